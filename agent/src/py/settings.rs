//! The settings as the agent reads them, for `python -m kvatlas doctor`.

use crate::address::Address;
use crate::config;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The settings of the environment for an engine of this data-parallel rank: `engine` (name and rank), `rank`, `events`
/// and `control` (addresses with the rank added), `seeded`, `index` (addresses dialled). Neither seed nor secret is told. `ValueError` when they are
/// bad.
#[pyfunction]
pub fn settings(py: Python<'_>, rank: u32) -> PyResult<Bound<'_, PyDict>> {
    let bad = |error: &dyn std::fmt::Display| PyValueError::new_err(error.to_string());
    let config = config::from_env().map_err(|error| bad(&error))?.unwrap_or_default();
    // "" is nowhere: an agent that dials listens only where it is told to.
    let address = |text: &str| match text {
        "" => Ok(String::new()),
        text => Address::parse(text, rank).map(|at| at.to_string()).map_err(|error| bad(&error)),
    };
    let out = PyDict::new(py);
    out.set_item("engine", format!("{}.{rank}", config.engine))?;
    out.set_item("rank", rank)?;
    out.set_item("events", address(&config.bind)?)?;
    out.set_item("control", address(&config.control)?)?;
    out.set_item("seeded", config.seed != 0)?;
    out.set_item("index", config.indexes.iter().map(ToString::to_string).collect::<Vec<_>>())?;
    Ok(out)
}
