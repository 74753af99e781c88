//! Reads vLLM's objects: requests, blocks, arguments, and the dicts that the Python side makes of its configuration.

use crate::engine::Request;
use crate::plan::{Plan, Together};
use crate::requests::{Item, Tokens, Which};
use crate::tiers::{Report, UNKNOWN_MEDIUM};
use proto::hit::{Hits, Kind};
use proto::native::dialect::Medium;
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyDict, PyList, PyString};

/// Token ids as the engine keeps them: a list of ints.
pub(super) struct Ids<'a, 'py>(pub(super) &'a Bound<'py, PyList>);

impl Tokens for Ids<'_, '_> {
    fn read(&self, from: usize, out: &mut [u32]) -> bool {
        if self.0.len() < from + out.len() {
            return false;
        }
        let list = self.0.as_ptr();
        for (at, out) in (from..).zip(out) {
            // Through the stable interface each count of a reference is a call: reading without them halves the time
            // of naming a block (`cargo bench-agent`).
            // SAFETY: the bound list proves that this thread holds the interpreter's lock and that the list lives. The
            // reference that is borrowed of it lasts until the list changes; nothing runs between the two calls, and
            // neither runs any Python: the first checks its bounds, the second takes ints and their subclasses as they
            // are and refuses all else.
            let id = unsafe {
                let item = ffi::PyList_GetItem(list, at as ffi::Py_ssize_t);
                if item.is_null() { std::ffi::c_ulong::MAX } else { ffi::PyLong_AsUnsignedLong(item) }
            };
            match u32::try_from(id) {
                Ok(id) => *out = id,
                Err(_) => {
                    let _ = PyErr::take(self.0.py());
                    return false; // a placeholder, as prompt embeddings have them
                }
            }
        }
        true
    }
}

/// A text. The stable interface of Python 3.9 lends none, so it is one small copy there.
pub(super) fn text(value: &Bound<'_, PyAny>) -> PyResult<PyBackedStr> {
    value.extract()
}

pub(super) fn optional<'py>(
    object: &Bound<'py, PyAny>,
    name: &Bound<'py, PyString>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    Ok(object.getattr_opt(name)?.filter(|value| !value.is_none()))
}

pub(super) fn argument<'py>(kwargs: &Bound<'py, PyDict>, name: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
    let missing = || PyValueError::new_err(format!("cache_full_blocks was called without {name}"));
    kwargs.get_item(name)?.ok_or_else(missing)
}

pub(super) fn block_id(block: &Bound<'_, PyAny>) -> PyResult<u32> {
    block.getattr(intern!(block.py(), "block_id"))?.extract()
}

pub(super) fn ids<'py>(request: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
    Ok(request.getattr(intern!(request.py(), "_all_token_ids"))?.cast_into::<PyList>()?)
}

/// Prompt embeddings enter the names of blocks by the digests that the engine made of them, a block each (vLLM 0.17.1
/// and later). Gives how many tokens can be named: up to the first block whose digest is not there yet.
fn embeddings(request: &Bound<'_, PyAny>, items: &mut Vec<Item>) -> PyResult<usize> {
    let Some(digests) = optional(request, intern!(request.py(), "_prompt_embeds_per_block_hashes"))? else {
        return Ok(0);
    };
    let mut known: Vec<(usize, usize, Vec<u8>)> = Vec::new();
    for (range, digest) in digests.cast_into::<PyDict>()? {
        let (start, end) = range.extract()?;
        known.push((start, end, digest.cast::<PyBytes>()?.as_bytes().to_vec()));
    }
    known.sort_unstable();
    let mut nameable = 0;
    for (start, end, digest) in known {
        if start != nameable || end <= start {
            break;
        }
        let identifier = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        items.push(Item { identifier, start, length: end - start });
        nameable = end;
    }
    Ok(nameable)
}

/// Calls `with` with the request as the engine's handle wants it; with `paths` an adapter's path is read too.
pub(super) fn described<R>(
    request: &Bound<'_, PyAny>,
    paths: bool,
    with: impl FnOnce(&Request<'_, Ids<'_, '_>>, Vec<Item>, usize) -> R,
) -> PyResult<R> {
    let py = request.py();
    let id = request.getattr(intern!(py, "request_id"))?;
    let tokens = ids(request)?;
    let prompt_tokens: usize = request.getattr(intern!(py, "num_prompt_tokens"))?.extract()?;
    let lora = optional(request, intern!(py, "lora_request"))?;
    let of_lora = |name| lora.as_ref().map(|lora| lora.getattr(name)).transpose();
    let adapter = of_lora(intern!(py, "lora_name"))?;
    let path = if paths { of_lora(intern!(py, "lora_path"))?.filter(|path| !path.is_none()) } else { None };
    let salt = optional(request, intern!(py, "cache_salt"))?;
    let mut items = Vec::new();
    let mut nameable = usize::MAX;
    if optional(request, intern!(py, "prompt_embeds"))?.is_some() {
        nameable = embeddings(request, &mut items)?;
    }
    let mut strange = false;
    if let Some(features) = optional(request, intern!(py, "mm_features"))? {
        for feature in features.try_iter()? {
            let feature = feature?;
            let position = feature.getattr(intern!(py, "mm_position"))?;
            match optional(&feature, intern!(py, "identifier"))? {
                Some(identifier) => items.push(Item {
                    identifier: text(&identifier)?.to_string(),
                    start: position.getattr(intern!(py, "offset"))?.extract()?,
                    length: position.getattr(intern!(py, "length"))?.extract()?,
                }),
                None => strange = true,
            }
        }
    }
    let id = text(&id)?;
    let told = |value: &Option<Bound<'_, PyAny>>| value.as_ref().map(text).transpose();
    let (adapter, path, salt) = (told(&adapter)?, told(&path)?, told(&salt)?);
    let request = Request {
        id: &id,
        tokens: &Ids(&tokens),
        prompt_tokens,
        adapter: adapter.as_deref().unwrap_or(""),
        adapter_path: path.as_deref().unwrap_or(""),
        salt: salt.as_deref().unwrap_or(""),
    };
    Ok(with(&request, items, if strange { 0 } else { nameable }))
}

/// How a request is called here: by the agent's number, which is kept in the request, or by the engine's id.
pub(super) enum Called {
    Number(u64),
    Id(PyBackedStr),
}

impl Called {
    pub(super) fn which(&self) -> Which<'_> {
        match self {
            Called::Number(number) => Which::Number(*number),
            Called::Id(id) => Which::Id(id),
        }
    }
}

pub(super) fn called(request: &Bound<'_, PyAny>) -> PyResult<Called> {
    let py = request.py();
    match optional(request, intern!(py, "_kvatlas"))?.and_then(|number| number.extract().ok()) {
        Some(number) => Ok(Called::Number(number)),
        None => Ok(Called::Id(text(&request.getattr(intern!(py, "request_id"))?)?)),
    }
}

/// Keeps the agent's number of a request in it, if it lets us: reading its id costs more than all else of a hook.
pub(super) fn number(request: &Bound<'_, PyAny>, number: u64) {
    let _ = request.setattr(intern!(request.py(), "_kvatlas"), number);
}

/// An entry of a dict of `facts.py`.
fn entry<'py, T: FromPyObjectOwned<'py>>(dict: &Bound<'py, PyDict>, name: &str) -> PyResult<T> {
    let missing = || PyValueError::new_err(format!("the rules have no {name:?}"));
    dict.get_item(name)?.ok_or_else(missing)?.extract().map_err(Into::into)
}

/// The rules of `facts.rules` as a plan.
pub(super) fn plan(rules: &Bound<'_, PyDict>) -> PyResult<Plan> {
    let (major, minor, patch) = entry(rules, "version")?;
    let hits = Hits {
        unit: entry(rules, "unit")?,
        align: entry(rules, "align")?,
        ahead: entry(rules, "ahead")?,
        version: [major, minor, patch],
        fine: entry(rules, "fine")?,
        specs: Vec::new(),
    };
    let mut specs = Vec::new();
    for spec in entry::<Vec<Bound<'_, PyDict>>>(rules, "specs")? {
        let kind = match entry::<String>(&spec, "kind")?.as_str() {
            "full" => Kind::Full,
            "window" => Kind::Window,
            "chunk" => Kind::Chunk,
            "mamba" => Kind::Mamba,
            other => return Err(PyValueError::new_err(format!("no kind of attention is called {other:?}"))),
        };
        let (block, span, eagle) = (entry(&spec, "block")?, entry(&spec, "span")?, entry(&spec, "eagle")?);
        specs.push(Together { kind, block, span, eagle, groups: entry(&spec, "groups")? });
    }
    Plan::new(hits, specs).map_err(|what| PyValueError::new_err(format!("the engine's rules make no sense: {what}")))
}

/// The last 8 bytes of one of the engine's hashes, big-endian: as bytes, or as the number that events carry.
pub(super) fn tail(hash: &Bound<'_, PyAny>) -> PyResult<u64> {
    if let Ok(bytes) = hash.cast::<PyBytes>() {
        let last = bytes.as_bytes().last_chunk::<8>();
        return last
            .map(|last| u64::from_be_bytes(*last))
            .ok_or_else(|| PyValueError::new_err("a hash of less than 8 bytes"));
    }
    hash.extract::<u64>().or_else(|_| Ok(hash.extract::<i64>()? as u64))
}

/// One event of a KV connector as reports: none for the GPU's own blocks, and for groups other than the first.
pub(super) fn reports(event: &Bound<'_, PyAny>, out: &mut Vec<Report>) -> PyResult<()> {
    let py = event.py();
    let class = event.get_type().name()?;
    let stored = match &*text(&class)? {
        "BlockStored" => true,
        "BlockRemoved" => false,
        "AllBlocksCleared" => {
            out.push(Report::Cleared);
            return Ok(());
        }
        _ => return Ok(()), // an event of a later version
    };
    let medium = match optional(event, intern!(py, "medium"))? {
        Some(medium) => Medium::from_name(&text(&medium)?),
        None => Medium::Gpu,
    };
    let medium = match medium {
        Medium::Gpu => return Ok(()),
        Medium::Cpu => 1,
        Medium::Storage => 2,
        Medium::Unknown => UNKNOWN_MEDIUM,
    };
    if optional(event, intern!(py, "group_idx"))?.is_some_and(|group| group.extract().is_ok_and(|group: u64| group > 0))
    {
        return Ok(());
    }
    // Events with tokens are of single blocks; those without name the last block of a larger one.
    let single = match optional(event, intern!(py, "token_ids"))? {
        Some(tokens) => tokens.len()? > 0,
        None => false,
    };
    for hash in event.getattr(intern!(py, "block_hashes"))?.try_iter()? {
        let hash = tail(&hash?)?;
        out.push(if stored { Report::Stored { hash, medium, single } } else { Report::Removed { hash, medium } });
    }
    Ok(())
}
