//! Readings of the engine's GPUs by NVML, where there is one.
//!
//! `libnvidia-ml.so.1` is loaded while the agent runs; without it nothing is told of GPUs, and only a debug line says
//! so. Its calls take milliseconds and may hang for good when a driver is in trouble, so all of them run on the
//! runtime's blocking threads, one reading at a time, a second apart: no heartbeat waits for them. The library is
//! never let go, since its shutdown may hang as well and the engine's own workers may use it.

use crate::gpus::{Chosen, Measured, Reading, Share, Summary, Visible, choose};
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use std::ffi::OsStr;
use std::time::Duration;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

/// Between readings: GPUs themselves measure their use about that often.
const PACE: Duration = Duration::from_secs(1);
/// A reading that takes longer is a hang.
const LATE: Duration = if cfg!(test) { Duration::from_millis(100) } else { Duration::from_secs(5) };
/// Most GPUs of one engine: no host has more than 16, MIG makes up to 7 of each.
const MOST: usize = 128;

/// The engine's GPUs.
pub struct Source {
    // `None`: one that was lost already when the agent started.
    devices: Vec<Option<Device<'static>>>,
    summary: Summary,
}

impl Source {
    /// Loads NVML from `library` and finds the engine's GPUs.
    ///
    /// # Errors
    /// When there is no NVML, or it says that there is no driver: both are usual on hosts without GPUs.
    pub fn open(library: &str, visible: &Visible, share: &Share) -> Result<Self, NvmlError> {
        let nvml: &'static Nvml = Box::leak(Box::new(Nvml::builder().lib_path(OsStr::new(library)).init()?));
        let count = nvml.device_count()?.min(MOST as u32);
        let name = |at| nvml.device_by_index(at).and_then(|device| device.uuid()).unwrap_or_default();
        let names: Vec<String> = (0..count).map(name).collect();
        let device = |chosen: Chosen| {
            let found = match chosen {
                Chosen::Whole(at) => nvml.device_by_index(at as u32),
                // A part knows neither its heat nor its use: those of the whole are taken.
                Chosen::Part(name) => nvml.device_by_uuid(name).and_then(|part| part.mig_parent_device()),
            };
            match found {
                Ok(device) => Some(Some(device)),
                Err(error) if is_lost(&error) => Some(None),
                Err(_) => None, // nothing is known of it, so nothing is held against it
            }
        };
        let devices = choose(&names, visible, share).into_iter().take(MOST).filter_map(device).collect();
        Ok(Self { devices, summary: Summary::default() })
    }

    /// One reading of all of them, and the first error that was no plain "not supported".
    pub fn read(&mut self) -> (Option<Measured>, Option<NvmlError>) {
        let mut fault = None;
        let readings: Vec<Reading> = self.devices.iter().map(|device| reading(device.as_ref(), &mut fault)).collect();
        (self.summary.of(&readings), fault)
    }
}

fn is_lost(error: &NvmlError) -> bool {
    matches!(error, NvmlError::GpuLost | NvmlError::ResetRequired)
}

fn reading(device: Option<&Device<'_>>, fault: &mut Option<NvmlError>) -> Reading {
    let Some(device) = device else { return Reading { lost: true, ..Reading::default() } };
    let mut lost = false;
    let mut ask = |error: NvmlError| {
        lost |= is_lost(&error);
        if !matches!(error, NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)) && fault.is_none() {
            *fault = Some(error);
        }
    };
    let mut errors = |of| device.total_ecc_errors(of, EccCounter::Volatile).map_err(&mut ask).ok();
    let (ecc_corrected, ecc_uncorrected) = (errors(MemoryError::Corrected), errors(MemoryError::Uncorrected));
    let utilization = device.utilization_rates().map_err(&mut ask).ok().map(|rates| rates.gpu);
    let memory = device.memory_info().map_err(&mut ask).ok().map(|memory| (memory.used, memory.total));
    let temperature_c = device.temperature(TemperatureSensor::Gpu).map_err(&mut ask).ok();
    let throttle = device.current_throttle_reasons().map_err(&mut ask).map_or(0, |reasons| reasons.bits());
    Reading { lost, utilization, memory, temperature_c, throttle, ecc_corrected, ecc_uncorrected }
}

/// Reads until the runtime ends, and gives each reading to `take`; `None` when readings fail to come.
pub async fn watch(library: String, visible: Visible, share: Share, take: impl Fn(Option<Measured>)) {
    let opened = spawn_blocking(move || Source::open(&library, &visible, &share)).await;
    let mut source = match opened {
        Ok(Ok(source)) if !source.devices.is_empty() => source,
        Ok(Ok(_)) => return tracing::debug!("no GPU of NVML is this engine's"),
        Ok(Err(error)) => return tracing::debug!(%error, "nothing is told of GPUs: there is no NVML"),
        Err(error) => return tracing::debug!(%error, "nothing is told of GPUs: NVML could not be loaded"),
    };
    let mut said = (false, false);
    loop {
        let mut reading = spawn_blocking(move || {
            let read = source.read();
            (source, read)
        });
        let read = match timeout(LATE, &mut reading).await {
            Ok(read) => read,
            Err(_) => {
                take(None);
                if !std::mem::replace(&mut said.0, true) {
                    tracing::warn!("NVML has not answered for 5 s: heartbeats go on without GPUs (said once)");
                }
                reading.await
            }
        };
        let Ok((back, (measured, fault))) = read else { return take(None) };
        source = back;
        take(measured);
        if let Some(error) = fault.filter(|_| !std::mem::replace(&mut said.1, true)) {
            tracing::warn!(%error, "NVML does not tell all of a GPU (said once)");
        }
        sleep(PACE).await;
    }
}

#[cfg(test)]
#[path = "nvml_tests.rs"]
mod tests;
