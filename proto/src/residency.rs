//! Physical copies in, changes of the closed set out.
