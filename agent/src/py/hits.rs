//! The search for a hit, for tests against real engines.

use proto::hit::Hits;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// What an engine takes from its cache for a prompt of `tokens` tokens: the search of the index and of the agent itself,
/// for tests against real engines. `rule` is the MessagePack of [`proto::hit::Hits`], as heartbeats carry it;
/// `has(set, at)` is asked of each fingerprint. `None` when the search was given up.
#[pyfunction]
pub(super) fn find_hit(rule: &[u8], tokens: usize, has: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    let hits: Hits = proto::control::decode(rule).map_err(|error| PyValueError::new_err(error.to_string()))?;
    if let Some(fault) = hits.fault() {
        return Err(PyValueError::new_err(format!("{fault} makes no sense")));
    }
    let mut raised = None;
    let ask = |set: usize, at: usize| match has.call1((set, at)).and_then(|there| there.is_truthy()) {
        Ok(there) => there,
        Err(error) => {
            raised = Some(error);
            false
        }
    };
    let hit = proto::hit::find(&hits, tokens, ask);
    raised.map_or(Ok(hit), Err)
}
