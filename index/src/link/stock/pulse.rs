//! What an engine's `/metrics` tell of it: that it lives, since when, and whether it works.

use super::super::{Effect, Link};
use crate::shared::Writer;

/// Prompt tokens after which an engine must have announced a block: several of the largest blocks.
const LOUD_TOKENS: f64 = 8192.0;

/// One reading.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Pulse {
    /// Start of the process, seconds since the Unix epoch on its own clock. Some servers (several API processes) do
    /// not say.
    pub started: Option<f64>,
    /// Prompt tokens that it has served, over all its ranks.
    pub served: Option<f64>,
}

impl Pulse {
    /// Reads Prometheus' text format of vLLM and SGLang; what it does not have is `None`.
    pub fn read(text: &str) -> Pulse {
        let mut pulse = Pulse::default();
        for line in text.lines() {
            let name = line.split(['{', ' ']).next().unwrap_or_default();
            let value = || line.rsplit_once(' ').and_then(|(_, value)| value.trim().parse::<f64>().ok());
            match name {
                "process_start_time_seconds" => pulse.started = value(),
                "vllm:prompt_tokens_total" | "sglang:prompt_tokens_total" => {
                    pulse.served = Some(pulse.served.unwrap_or(0.0) + value().unwrap_or(0.0));
                }
                _ => {}
            }
        }
        pulse
    }
}

/// What earlier readings told.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Known {
    started: Option<f64>,
    /// At the first reading of a process that was not heard yet.
    served_first: Option<f64>,
    served: Option<f64>,
    heard: bool,
    /// The stream told of another process since the last reading.
    restarted: bool,
}

impl Known {
    pub(super) fn heard(&mut self) {
        self.heard = true;
    }

    pub(super) fn restarted(&mut self) {
        self.restarted = true;
    }

    /// It works, and says nothing.
    pub(super) fn mute(&self) -> bool {
        let served = self.served.zip(self.served_first).map_or(0.0, |(now, first)| now - first);
        !self.heard && served >= LOUD_TOKENS
    }
}

impl Link {
    /// The engine's metrics were read.
    pub fn pulse(&mut self, core: &mut Writer, pulse: Pulse, now_ms: u64, out: &mut Vec<Effect>) {
        let Some(stock) = self.stock.as_mut() else { return };
        self.heard_ms = Some(now_ms);
        self.dirty = true;
        let known = &mut stock.pulse;
        let other = known.started.zip(pulse.started).is_some_and(|(before, now)| before != now);
        // The stream may have said so before.
        let news = other && !known.restarted;
        let same = !other && known.started.is_some() && pulse.started.is_some();
        let unknown = stock.unsure && !same && !other;
        stock.unsure &= !same;
        *known = Known {
            started: pulse.started.or(known.started),
            served_first: if other { Some(0.0) } else { known.served_first.or(pulse.served) },
            served: pulse.served,
            heard: known.heard && !other,
            restarted: false,
        };
        if unknown {
            // It does not tell: what was held before the connection was lost may be another process's.
            let outcome = self.hole(core, out);
            self.settle(core, outcome, now_ms);
        }
        if news {
            let outcome = self.another_life(core, out);
            if let Some(stock) = self.stock.as_mut() {
                stock.pulse.restarted = false;
                // What comes first may be the middle of its stream.
                stock.missed = true;
            }
            self.settle(core, outcome, now_ms);
        }
    }

    /// The engine's metrics could not be read.
    pub fn no_pulse(&mut self, reason: String) {
        if self.stock.is_some() {
            self.dirty = true;
            self.fault = format!("its /metrics cannot be read: {reason}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_real_engines_are_read() {
        let text = "# HELP process_start_time_seconds Start time\nprocess_start_time_seconds 1.79612762918e+09\n\
                    vllm:prompt_tokens_total{engine=\"0\",model_name=\"tiny\"} 5670.0\n\
                    vllm:prompt_tokens_total{engine=\"1\",model_name=\"tiny one\"} 30.0\n";
        assert_eq!(Pulse::read(text), Pulse { started: Some(1_796_127_629.18), served: Some(5700.0) });
        assert_eq!(Pulse::read("<html>not found</html>"), Pulse::default());
    }
}
