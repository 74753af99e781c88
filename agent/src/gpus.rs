//! Which GPUs an engine uses, and what their readings come to.

use proto::event::Gpus;

/// The name by which the dynamic linker finds NVML, on every host that has a driver.
pub const NVML: &str = "libnvidia-ml.so.1";

/// What the environment makes visible.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Visible {
    /// `CUDA_VISIBLE_DEVICES`: what this process may use of what it sees. Set and empty: nothing.
    pub cuda: Option<String>,
    /// `NVIDIA_VISIBLE_DEVICES`: what the container was given.
    pub nvidia: Option<String>,
}

/// Which of the visible GPUs are this engine's.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Share {
    /// Position of this engine among the data-parallel ones of this host.
    pub place: usize,
    /// GPUs of each of them on this host; 0 if unknown: then all visible ones count.
    pub world: usize,
    /// The engine's own list of GPUs, by NVML's numbers, where it has one.
    pub ids: Option<Vec<u32>>,
}

/// One GPU, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Chosen {
    /// By NVML's number.
    Whole(usize),
    /// A MIG instance, by its name.
    Part(String),
}

/// The engine's GPUs. `names` are the UUIDs of all that NVML sees, by its numbers; "" for one that does not answer.
///
/// A container sees what it was given, so `NVIDIA_VISIBLE_DEVICES` says nothing new, unless it is privileged and sees
/// all of the host: then UUIDs in it are looked for, and numbers in it, which are the host's, count when more GPUs are
/// seen than are listed. Numbers in `CUDA_VISIBLE_DEVICES` are positions among those, as CUDA sees them in the order of
/// their PCI addresses (vLLM takes them so too), and the first bad entry ends the list. Of what is visible each
/// data-parallel engine of a host takes the next `world`; where the engine's launcher narrowed the list to just these,
/// all of it. GPUs of other hosts are not seen.
pub fn choose(names: &[String], visible: &Visible, share: &Share) -> Vec<Chosen> {
    let given = given(names, visible.nvidia.as_deref());
    let seen: Vec<Chosen> = match (&share.ids, visible.cuda.as_deref()) {
        (Some(ids), _) => ids.iter().map(|id| *id as usize).filter(|id| *id < names.len()).map(Chosen::Whole).collect(),
        (None, None) => given.into_iter().map(Chosen::Whole).collect(),
        (None, Some(list)) => {
            let mut seen = Vec::new();
            for entry in list.split(',').map(str::trim) {
                let found = match entry.parse::<usize>() {
                    Ok(at) => given.get(at).copied().map(Chosen::Whole),
                    Err(_) => named(names, entry),
                };
                match found {
                    Some(found) if !seen.contains(&found) => seen.push(found),
                    Some(_) => {}
                    None => break,
                }
            }
            seen
        }
    };
    let from = share.place * share.world;
    match seen.get(from..from + share.world) {
        Some(own) if share.world > 0 && seen.len() != share.world => own.to_vec(),
        _ => seen,
    }
}

fn given(names: &[String], nvidia: Option<&str>) -> Vec<usize> {
    let all: Vec<usize> = (0..names.len()).collect();
    let list = match nvidia.map(str::trim) {
        None | Some("" | "all" | "void") => return all,
        Some("none") => return Vec::new(),
        Some(list) => list,
    };
    let entries: Vec<&str> = list.split(',').map(str::trim).collect();
    let mut given: Vec<usize> = entries
        .iter()
        .filter_map(|entry| match entry.parse::<usize>() {
            Ok(at) => Some(at).filter(|at| *at < names.len() && names.len() > entries.len()),
            Err(_) => match named(names, entry) {
                Some(Chosen::Whole(at)) => Some(at),
                _ => None,
            },
        })
        .collect();
    given.sort_unstable();
    given.dedup();
    if given.is_empty() { all } else { given }
}

/// By UUID, or the beginning of one.
fn named(names: &[String], entry: &str) -> Option<Chosen> {
    if let Some(old) = entry.strip_prefix("MIG-GPU-") {
        // The older way to name an instance: that of the GPU, and two numbers.
        let gpu = format!("GPU-{}", old.split('/').next().unwrap_or_default());
        return names.iter().position(|name| *name == gpu).map(Chosen::Whole);
    }
    if entry.starts_with("MIG-") {
        return Some(Chosen::Part(entry.to_string()));
    }
    let long_enough = entry.len() > "GPU-".len();
    names.iter().position(|name| long_enough && name.starts_with(entry)).map(Chosen::Whole)
}

/// What one GPU said. `None`: it does not know, or said nonsense.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Reading {
    /// It does not answer any more: fallen off the bus, or in need of a reset.
    pub lost: bool,
    /// Percent of time in which a kernel ran.
    pub utilization: Option<u32>,
    /// Bytes taken, and all.
    pub memory: Option<(u64, u64)>,
    /// Degrees Celsius.
    pub temperature_c: Option<u32>,
    /// Why clocks are lowered: the bits of NVML's `nvmlClocksThrottleReason`.
    pub throttle: u64,
    /// Corrected memory errors since the driver was loaded.
    pub ecc_corrected: Option<u64>,
    /// Memory errors that were not corrected, since then.
    pub ecc_uncorrected: Option<u64>,
}

/// Bits of NVML's throttle reasons that are told, and their names.
const REASONS: [(u64, &str); 5] = [
    (0x20, "thermal"),     // SwThermalSlowdown
    (0x40, "hw_thermal"),  // HwThermalSlowdown
    (0x08, "hw_slowdown"), // HwSlowdown: heat, power brake, or power draw
    (0x80, "power_brake"), // HwPowerBrakeSlowdown
    (0x04, "power_cap"),   // SwPowerCap
];

/// What the readings came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// Mean utilization, 0 to 1, of those that know theirs.
    pub utilization: Option<f32>,
    /// The worst of each.
    pub gpus: Gpus,
}

/// Remembers the first count of memory errors of each GPU, so that new ones are known.
#[derive(Debug, Default)]
pub struct Summary {
    first: Vec<Option<u64>>,
}

impl Summary {
    /// What these readings, one of each of the engine's GPUs in an order that stays, come to. `None` without GPUs.
    pub fn of(&mut self, readings: &[Reading]) -> Option<Measured> {
        if readings.is_empty() {
            return None;
        }
        self.first.resize(readings.len(), None);
        let mut gpus = Gpus { count: readings.len() as u32, ..Gpus::default() };
        let mut used = Vec::new();
        for (reading, first) in readings.iter().zip(&mut self.first) {
            gpus.lost += u32::from(reading.lost);
            used.extend(reading.utilization.filter(|percent| *percent <= 100));
            if let Some((taken, all)) = reading.memory.filter(|(taken, all)| taken <= all && *all > 0) {
                gpus.memory_use = gpus.memory_use.max(taken as f32 / all as f32);
            }
            // No GPU runs at 150 C or more.
            gpus.temperature_c = gpus.temperature_c.max(reading.temperature_c.filter(|c| *c < 150).unwrap_or(0));
            let count = |told: Option<u64>| told.filter(|count| *count < 1 << 48).unwrap_or(0);
            gpus.ecc_corrected = gpus.ecc_corrected.max(count(reading.ecc_corrected));
            if reading.ecc_uncorrected.is_some() {
                let now = count(reading.ecc_uncorrected);
                // A count that falls is a driver that was loaded anew.
                let first = first.insert(first.map_or(now, |first| first.min(now)));
                gpus.ecc_uncorrected = gpus.ecc_uncorrected.max(now);
                gpus.ecc_new = gpus.ecc_new.max(now - *first);
            }
        }
        let bits = readings.iter().fold(0, |bits, reading| bits | reading.throttle);
        gpus.throttled =
            REASONS.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| (*name).to_string()).collect();
        let mean = used.iter().sum::<u32>() as f32 / used.len().max(1) as f32 / 100.0;
        Some(Measured { utilization: (!used.is_empty()).then_some(mean), gpus })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(cuda: Option<&str>, nvidia: Option<&str>, share: &Share) -> String {
        let names: Vec<String> = ["GPU-aa11", "GPU-bb22", "GPU-cc33", "GPU-bb44"].map(String::from).to_vec();
        let visible = Visible { cuda: cuda.map(String::from), nvidia: nvidia.map(String::from) };
        let text = |chosen: &Chosen| match chosen {
            Chosen::Whole(at) => at.to_string(),
            Chosen::Part(name) => name.clone(),
        };
        choose(&names, &visible, share).iter().map(text).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_visible_ones_are_chosen() {
        let all = Share::default();
        for (cuda, nvidia, are) in [
            (None, None, "0 1 2 3"),
            (None, Some("all"), "0 1 2 3"),
            (None, Some("void"), "0 1 2 3"),
            (None, Some("none"), ""),
            (None, Some("3,1"), "1 3"),
            (None, Some("0,1,2,7"), "0 1 2 3"), // as many as are seen: the host's numbers of just these
            (None, Some("9"), "0 1 2 3"),
            (None, Some("GPU-cc33,GPU-aa11"), "0 2"),
            (None, Some("GPU-elsewhere"), "0 1 2 3"),
            (Some("2,0"), None, "2 0"),
            (Some(""), None, ""),
            (Some("-1"), None, ""),
            (Some("1,-1,2"), None, "1"),
            (Some("1,9,2"), None, "1"),
            (Some("1,1"), None, "1"),
            (Some("GPU-cc,GPU-bb4"), None, "2 3"),
            (Some("GPU-"), None, ""),
            (Some("MIG-5c1a"), None, "MIG-5c1a"),
            (Some("MIG-GPU-cc33/1/0"), None, "2"),
            (Some("1"), Some("GPU-bb22,GPU-bb44"), "3"),
            (Some("0"), Some("2,3"), "2"),
        ] {
            assert_eq!(chosen(cuda, nvidia, &all), are, "{cuda:?} {nvidia:?}");
        }
    }

    #[test]
    fn each_data_parallel_engine_takes_its_own() {
        let share = |place, world| Share { place, world, ids: None };
        assert_eq!(chosen(None, None, &share(1, 2)), "2 3");
        assert_eq!(chosen(Some("3,2,1,0"), None, &share(1, 1)), "2");
        assert_eq!(chosen(Some("2,3"), None, &share(1, 2)), "2 3", "narrowed already");
        assert_eq!(chosen(Some("2,3"), None, &share(3, 2)), "2 3", "nothing fits: all that is seen");
        let ids = |ids: &[u32], place, world| Share { place, world, ids: Some(ids.to_vec()) };
        assert_eq!(chosen(Some("0"), None, &ids(&[3, 1], 0, 2)), "3 1");
        assert_eq!(chosen(None, None, &ids(&[0, 2, 77], 1, 1)), "2");
    }

    #[test]
    fn the_worst_counts_and_use_is_the_mean() {
        let mut summary = Summary::default();
        let cool = Reading {
            utilization: Some(40),
            memory: Some((50, 100)),
            temperature_c: Some(60),
            ecc_corrected: Some(7),
            ecc_uncorrected: Some(2),
            ..Reading::default()
        };
        let hot = Reading {
            utilization: Some(80),
            memory: Some((90, 100)),
            temperature_c: Some(86),
            throttle: 0x20 | 0x01,
            ..Reading::default()
        };
        let first = summary.of(&[cool.clone(), hot.clone()]);
        let gpus = Gpus {
            count: 2,
            memory_use: 0.9,
            temperature_c: 86,
            throttled: vec!["thermal".into()],
            ecc_corrected: 7,
            ecc_uncorrected: 2,
            ..Gpus::default()
        };
        assert_eq!(first, Some(Measured { utilization: Some(0.6), gpus: gpus.clone() }));
        let worse = Reading { ecc_uncorrected: Some(3), ..cool.clone() };
        let lost = Reading { lost: true, ..Reading::default() };
        let gone = summary.of(&[worse.clone(), lost]).map(|m| (m.gpus.ecc_new, m.gpus.lost, m.utilization));
        assert_eq!(gone, Some((1, 1, Some(0.4))));
        let reloaded = summary.of(&[Reading { ecc_uncorrected: Some(0), ..cool }, hot.clone()]);
        assert_eq!(reloaded.map(|m| m.gpus.ecc_new), Some(0));
        assert_eq!(summary.of(&[worse, hot]).map(|m| m.gpus.ecc_new), Some(3));
        assert_eq!(summary.of(&[]), None);
    }

    #[test]
    fn nonsense_is_not_known() {
        let nonsense = Reading {
            utilization: Some(4_000_000_000),
            memory: Some((u64::MAX, 3)),
            temperature_c: Some(u32::MAX),
            ecc_corrected: Some(u64::MAX),
            ecc_uncorrected: Some(u64::MAX),
            throttle: !0xff,
            ..Reading::default()
        };
        let measured = Summary::default().of(&[nonsense]);
        assert_eq!(measured, Some(Measured { utilization: None, gpus: Gpus { count: 1, ..Gpus::default() } }));
    }
}
