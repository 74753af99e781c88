//! kvatlas.
