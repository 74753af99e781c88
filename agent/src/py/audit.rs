//! Reads the pool itself, for an audit: on the publisher's helper thread, a page at a time.

use crate::edge::control::AuditPage;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

/// Blocks in one page of an audit: with 32-byte digests, about 180 KiB.
const AUDIT_BLOCKS: usize = 4096;
/// Pool blocks looked at for one page, so that the engine is not held up: about 2 ms.
const AUDIT_LOOKS: u64 = 1 << 15;

/// A page of the pool's cached blocks, with the engine's digests less the group's 4 bytes.
pub(super) fn page(pool: &Bound<'_, PyAny>, from: u64) -> PyResult<AuditPage> {
    let py = pool.py();
    let blocks = pool.getattr(intern!(py, "blocks"))?.cast_into::<PyList>()?;
    let (mut out, total) = (Vec::new(), blocks.len() as u64);
    let mut at = from;
    while at < total.min(from.saturating_add(AUDIT_LOOKS)) && out.len() < AUDIT_BLOCKS {
        let hash = blocks.get_item(at as usize)?.getattr(intern!(py, "block_hash"))?;
        if !hash.is_none() {
            let hash = hash.cast::<PyBytes>()?.as_bytes();
            out.push((at, hash[..hash.len().saturating_sub(4)].to_vec()));
        }
        at += 1;
    }
    Ok((out, (at < total).then_some(at)))
}
