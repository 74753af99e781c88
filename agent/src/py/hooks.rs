//! The hooks that run for every block: native, so that no Python does.

use super::Agent;
use super::read::optional;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

/// The agent of a pool, if it has one.
fn agent_of<'py>(pool: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, Agent>>> {
    Ok(optional(pool, intern!(pool.py(), "_kvatlas"))?.map(|agent| agent.cast_into::<Agent>()).transpose()?)
}

/// Tells what is owed to the publisher, on its helper thread, while the engine rests. Between two of the engine's own
/// steps: nothing here lets go of the interpreter's lock, and an agent that is in use is left to tell by itself.
pub(super) fn settle(pool: &Bound<'_, PyAny>) {
    if let Ok(Some(agent)) = agent_of(pool)
        && let Ok(mut agent) = agent.try_borrow_mut()
        && let Some(agent) = &mut agent.running
    {
        agent.engine.tell();
    }
}

/// The hook of `BlockPool.cache_full_blocks`.
#[pyfunction]
pub(super) fn hook_cached(
    pool: &Bound<'_, PyAny>,
    result: &Bound<'_, PyAny>,
    args: &Bound<'_, PyTuple>,
    kwargs: &Bound<'_, PyDict>,
) -> PyResult<()> {
    let _ = result;
    let Some(agent) = agent_of(pool)? else { return Ok(()) };
    if args.is_empty() {
        return agent.try_borrow_mut()?.cached(kwargs);
    }
    // vLLM names all arguments; somebody's subclass may not.
    let names =
        ["request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id", "block_mask"];
    let all = kwargs.copy()?;
    for (name, value) in names.into_iter().zip(args) {
        all.set_item(name, value)?;
    }
    agent.try_borrow_mut()?.cached(&all)
}

/// The hook of `BlockPool.get_new_blocks`.
#[pyfunction]
pub(super) fn hook_handed_out(
    pool: &Bound<'_, PyAny>,
    result: &Bound<'_, PyAny>,
    args: &Bound<'_, PyTuple>,
    kwargs: &Bound<'_, PyDict>,
) -> PyResult<()> {
    let _ = (args, kwargs);
    match agent_of(pool)? {
        Some(agent) => agent.try_borrow_mut()?.handed_out(result.cast::<PyList>()?),
        None => Ok(()),
    }
}
