//! How healthy an engine is: facts in, one number from 0 to 1 and its reasons out.

use proto::event::Gpus;

/// A step that takes longer than this, while work waits, is no ordinary one: a chunk of prefill takes up to about two
/// seconds on the largest models.
pub const SLOW_STEP_MS: u64 = 2_000;
/// An engine that works and makes no step for this long gets no new requests: they would wait at least as long.
pub const HUNG_STEP_MS: u64 = 10_000;
/// One that makes no step for this long counts as failed: its collective operations have given up, or will.
pub const FAILED_STEP_MS: u64 = 60_000;

/// What the score is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Vitals<'a> {
    /// Takes no new requests, by somebody's will.
    pub draining: bool,
    /// Sleeps.
    pub asleep: bool,
    /// Milliseconds since the last step, or since work began to wait, whichever is later; 0 while none waits.
    pub stalled_ms: u64,
    /// Share of KV blocks in use by live requests, 0 to 1.
    pub kv_use: f32,
    /// Share of the pool's blocks that hold something to hit, 0 to 1; `None` where nothing can be hit.
    pub warmth: Option<f32>,
    /// What is measured of the GPUs; `None` where it cannot be, which is no fault.
    pub gpus: Option<&'a Gpus>,
}

/// A score, and what lowered it.
#[derive(Debug, Clone, PartialEq)]
pub struct Health {
    /// 1 = healthy, below 0.3 no new requests, 0 = draining or failed.
    pub score: f32,
    /// By name, the worst first.
    pub ailments: Vec<&'static str>,
}

/// The score: the product of a factor for each row that holds, so that two moderate troubles are worse than one. Of
/// rows in one block, which have one cause, the lowest counts alone.
///
/// | block | what holds | factor | named |
/// |---|---|---|---|
/// | will | draining | 0 | `draining` |
/// | | asleep | 0 | `asleep` |
/// | steps | work waits, no step for 2 s to 10 s | 1 falling evenly to 0.3 | `slow` |
/// | | ... for 10 s to 60 s: no new requests | 0.2 | `stalled` |
/// | | ... for 60 s or more: failed | 0 | `failed` |
/// | presence | a GPU has fallen off the bus or needs a reset | 0.1 | `gpu_lost` |
/// | memory errors | an uncorrected one since the agent looks | 0.4 | `ecc_uncorrected` |
/// | | an uncorrected one before, since the driver was loaded | 0.8 | `ecc_uncorrected_before` |
/// | | 100 or more corrected ones: single ones are everyday | 0.9 | `ecc_corrected` |
/// | heat and power | clocks halved by hardware: heat, power brake, other | 0.7 | `gpu_slowdown` |
/// | | clocks lowered for heat (10 to 30 % slower) | 0.8 | `gpu_throttled` |
/// | | above 83 C | 0.9 | `gpu_hot` |
/// | memory pressure | KV blocks used up to 99 % or more: the next step preempts | 0.8 | `kv_full` |
/// | | ... to 95 % or more | 0.9 | `kv_nearly_full` |
/// | | a GPU's memory taken to 99.5 % or more | 0.9 | `gpu_memory_full` |
/// | cache | it holds less than a tenth of the pool | 1 falling evenly to 0.9 when empty | `cold` |
///
/// So an engine that is whole, warm and steps has 1.0; with some memory errors, throttling or pressure 0.7 to 0.9;
/// 0.3 to 0.6, where several of these meet or memory fails, is for want of a better one; below 0.3 requests that run
/// are finished and no new ones come; a cold cache alone never costs more than 0.1.
///
/// *Model loaded*, as against *process alive*, needs no row: the agent is made by the engine's scheduler, and that is
/// made after the weights are loaded, the model is warmed up and the KV pool is allocated. An engine that loads
/// (120 to 300 s for 70B) has no agent, sends no heartbeat, and is `silent` to index and picker.
///
/// Clocks that are limited by the power limit (`power_cap`) are how a busy GPU runs: no row. Utilization is load, not
/// health: no row. What is not known costs nothing.
pub fn score(vitals: &Vitals<'_>) -> Health {
    let none = Gpus::default();
    let gpus = vitals.gpus.unwrap_or(&none);
    let throttled = |name: &str| gpus.throttled.iter().any(|why| why == name);
    let will = [(vitals.draining, 0.0, "draining"), (vitals.asleep, 0.0, "asleep")];
    let stalled_ms = vitals.stalled_ms;
    let slow = stalled_ms.saturating_sub(SLOW_STEP_MS) as f32 / (HUNG_STEP_MS - SLOW_STEP_MS) as f32;
    let steps = [
        (stalled_ms >= FAILED_STEP_MS, 0.0, "failed"),
        (stalled_ms >= HUNG_STEP_MS, 0.2, "stalled"),
        (stalled_ms > SLOW_STEP_MS, 1.0 - 0.7 * slow.min(1.0), "slow"),
    ];
    let presence = [(gpus.lost > 0, 0.1, "gpu_lost")];
    let errors = [
        (gpus.ecc_new > 0, 0.4, "ecc_uncorrected"),
        (gpus.ecc_uncorrected > 0, 0.8, "ecc_uncorrected_before"),
        (gpus.ecc_corrected >= 100, 0.9, "ecc_corrected"),
    ];
    let halved = ["hw_thermal", "hw_slowdown", "power_brake"].into_iter().any(throttled);
    let heat = [
        (halved, 0.7, "gpu_slowdown"),
        (throttled("thermal"), 0.8, "gpu_throttled"),
        (gpus.temperature_c > 83, 0.9, "gpu_hot"),
    ];
    let pressure = [
        (vitals.kv_use >= 0.99, 0.8, "kv_full"),
        (vitals.kv_use >= 0.95, 0.9, "kv_nearly_full"),
        (gpus.memory_use >= 0.995, 0.9, "gpu_memory_full"),
    ];
    let warmth = vitals.warmth.unwrap_or(1.0).clamp(0.0, 1.0);
    let cache = [(warmth < 0.1, 0.9 + warmth, "cold")];
    let blocks: [&[(bool, f32, &'static str)]; 7] = [&will, &steps, &presence, &errors, &heat, &pressure, &cache];
    let mut found: Vec<(f32, &'static str)> =
        blocks.iter().filter_map(|rows| rows.iter().find(|row| row.0)).map(|row| (row.1, row.2)).collect();
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    Health { score: found.iter().map(|row| row.0).product(), ailments: found.iter().map(|row| row.1).collect() }
}

/// Follows the engine's steps: for how long none was made while work waited.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pulse {
    steps: u64,
    // When the last step was made or, if later, work began to wait; `None` while none waits.
    since_ms: Option<u64>,
}

impl Pulse {
    /// To be called with every look at the engine: its steps so far and whether work waits, at `now_ms`. Returns the
    /// milliseconds without a step. An engine that was idle for an hour is not late with the first request after it.
    pub fn look(&mut self, now_ms: u64, steps: u64, waits: bool) -> u64 {
        if !waits {
            self.since_ms = None;
        } else if self.since_ms.is_none() || steps != self.steps {
            self.since_ms = Some(now_ms);
        }
        self.steps = steps;
        self.since_ms.map_or(0, |since| now_ms.saturating_sub(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WELL: Vitals<'static> =
        Vitals { draining: false, asleep: false, stalled_ms: 0, kv_use: 0.5, warmth: Some(0.5), gpus: None };

    fn near(is: &Health, score: f32, ailments: &[&str]) -> bool {
        (is.score - score).abs() < 1e-6 && is.ailments == ailments
    }

    #[test]
    fn the_table() {
        let gpus = || Gpus { count: 1, memory_use: 0.92, temperature_c: 70, ..Gpus::default() };
        let throttled = |why: &str| Gpus { throttled: vec![why.into()], ..gpus() };
        let rows: Vec<(Vitals<'_>, f32, &[&str])> = vec![
            (WELL, 1.0, &[]),
            (Vitals { warmth: None, ..WELL }, 1.0, &[]),
            (Vitals { draining: true, ..WELL }, 0.0, &["draining"]),
            (Vitals { asleep: true, ..WELL }, 0.0, &["asleep"]),
            (Vitals { stalled_ms: 2_000, ..WELL }, 1.0, &[]),
            (Vitals { stalled_ms: 6_000, ..WELL }, 0.65, &["slow"]),
            (Vitals { stalled_ms: 9_999, ..WELL }, 0.300_087_5, &["slow"]),
            (Vitals { stalled_ms: 10_000, ..WELL }, 0.2, &["stalled"]),
            (Vitals { stalled_ms: 59_999, ..WELL }, 0.2, &["stalled"]),
            (Vitals { stalled_ms: 60_000, ..WELL }, 0.0, &["failed"]),
            (Vitals { kv_use: 0.95, ..WELL }, 0.9, &["kv_nearly_full"]),
            (Vitals { kv_use: 0.99, ..WELL }, 0.8, &["kv_full"]),
            (Vitals { warmth: Some(0.1), ..WELL }, 1.0, &[]),
            (Vitals { warmth: Some(0.05), ..WELL }, 0.95, &["cold"]),
            (Vitals { warmth: Some(0.0), ..WELL }, 0.9, &["cold"]),
        ];
        for (vitals, score_, ailments) in rows {
            assert!(near(&score(&vitals), score_, ailments), "{vitals:?}: {:?}", score(&vitals));
        }
        let of_gpus: Vec<(Gpus, f32, &[&str])> = vec![
            (gpus(), 1.0, &[]),
            (throttled("power_cap"), 1.0, &[]),
            (throttled("thermal"), 0.8, &["gpu_throttled"]),
            (throttled("hw_thermal"), 0.7, &["gpu_slowdown"]),
            (throttled("hw_slowdown"), 0.7, &["gpu_slowdown"]),
            (throttled("power_brake"), 0.7, &["gpu_slowdown"]),
            (Gpus { temperature_c: 83, ..gpus() }, 1.0, &[]),
            (Gpus { temperature_c: 84, ..gpus() }, 0.9, &["gpu_hot"]),
            (Gpus { temperature_c: 84, ..throttled("thermal") }, 0.8, &["gpu_throttled"]),
            (Gpus { ecc_corrected: 99, ..gpus() }, 1.0, &[]),
            (Gpus { ecc_corrected: 100, ..gpus() }, 0.9, &["ecc_corrected"]),
            (Gpus { ecc_uncorrected: 1, ecc_corrected: 100, ..gpus() }, 0.8, &["ecc_uncorrected_before"]),
            (Gpus { ecc_uncorrected: 2, ecc_new: 1, ..gpus() }, 0.4, &["ecc_uncorrected"]),
            (Gpus { memory_use: 0.995, ..gpus() }, 0.9, &["gpu_memory_full"]),
            (Gpus { lost: 1, ..gpus() }, 0.1, &["gpu_lost"]),
            (Gpus { temperature_c: 90, ecc_corrected: 1000, ..gpus() }, 0.81, &["ecc_corrected", "gpu_hot"]),
        ];
        for (gpus, score_, ailments) in of_gpus {
            let is = score(&Vitals { gpus: Some(&gpus), ..WELL });
            assert!(near(&is, score_, ailments), "{gpus:?}: {is:?}");
        }
    }

    #[test]
    fn whatever_is_told_it_is_a_share_and_worse_is_never_better() {
        let worst = Gpus {
            count: 8,
            lost: 8,
            memory_use: f32::NAN,
            temperature_c: u32::MAX,
            throttled: vec!["hw_thermal".into(), "no such".into()],
            ecc_corrected: u64::MAX,
            ecc_uncorrected: u64::MAX,
            ecc_new: u64::MAX,
        };
        for (stalled_ms, kv_use, warmth) in
            [(0, f32::NAN, f32::NAN), (u64::MAX, f32::INFINITY, -1.0), (3_000, -1.0, 9.0)]
        {
            let vitals = Vitals { stalled_ms, kv_use, warmth: Some(warmth), gpus: Some(&worst), ..WELL };
            let is = score(&vitals).score;
            assert!((0.0..=1.0).contains(&is) && is < 0.3, "{vitals:?}: {is}");
        }
        let mut before = 2.0;
        for stalled_ms in (0..70_000).step_by(500) {
            let now = score(&Vitals { stalled_ms, ..WELL }).score;
            assert!(now <= before, "at {stalled_ms} ms");
            before = now;
        }
        assert_eq!(before, 0.0);
    }

    #[test]
    fn idle_time_is_no_stall() {
        let mut pulse = Pulse::default();
        assert_eq!(pulse.look(1_000, 0, false), 0);
        assert_eq!(pulse.look(3_600_000, 0, true), 0, "work came after an idle hour");
        assert_eq!(pulse.look(3_603_000, 0, true), 3_000);
        assert_eq!(pulse.look(3_603_100, 1, true), 0, "a step");
        assert_eq!(pulse.look(3_604_100, 1, true), 1_000);
        assert_eq!(pulse.look(3_604_200, 1, false), 0, "the work is gone without a step: aborted");
        assert_eq!(pulse.look(3_700_000, 1, true), 0);
    }
}
