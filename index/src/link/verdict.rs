//! Does this engine name its blocks as this index does? If not, what differs?

use proto::block;
use proto::event::{HitRule, State};

/// `None` when the engine's `check` is what this index computes; else what differs and what to do.
pub fn mismatch(state: &State, seed: u64) -> Option<String> {
    let Some(model) = state.models.first() else {
        return Some("the heartbeat names no served model, so its namespace is unknown".into());
    };
    let check = |model: &str, seed, block_size| block::check(model, seed, block_size) == state.check;
    if check(model, seed, state.block_size) {
        return None;
    }
    if seed != 0 && check(model, 0, state.block_size) {
        return Some("seed differs: the engine has none; set KVATLAS_SEED there to this deployment's seed".into());
    }
    if let Some(other) = state.models.iter().skip(1).find(|name| check(name, seed, state.block_size)) {
        return Some(format!("namespace differs: the engine hashes under {other:?}, but serves {model:?} first"));
    }
    // Sizes in use are powers of two up to 1,024: 2,047 tokens are hashed in all.
    if let Some(size) = (0..=10).map(|power| 1u32 << power).find(|size| check(model, seed, *size)) {
        return Some(format!(
            "block size differs: the engine says {}, but hashes {size} tokens a block",
            state.block_size
        ));
    }
    Some(format!(
        "seed or version differs: this index computes another fingerprint for the engine's model {model:?} and block \
         size {}; give both the same seed (KVATLAS_SEED) and agents of this release",
        state.block_size
    ))
}

/// What differs when the fleet list (or the connection) says another data-parallel rank than the engine.
pub fn rank(state: &State, told: Option<u32>) -> Option<String> {
    let told = told.filter(|told| *told != state.engine.rank)?;
    Some(format!(
        "rank differs: the fleet list says {told}, the engine {}; each rank publishes on the base port plus its rank",
        state.engine.rank
    ))
}

/// What is to be said of the rule by which an engine's hits end.
pub fn unknown_rule(state: &State) -> Option<&'static str> {
    (state.rule == HitRule::Unknown)
        .then_some("the agent does not know how hits end on this engine: nothing is credited")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(models: &[&str], check: u64) -> State {
        let json = serde_json::json!({
            "engine": "a.0", "models": models, "block_size": 16, "check": check, "digests": [],
            "running": 0, "waiting": 0, "kv_use": 0.0,
        });
        serde_json::from_value(json).unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn f6_a_rank_that_the_list_does_not_say_is_named() {
        assert_eq!(rank(&state(&["m"], 1), None), None);
        assert_eq!(rank(&state(&["m"], 1), Some(0)), None);
        let reason = rank(&state(&["m"], 1), Some(3)).unwrap_or_default();
        assert!(reason.contains("says 3") && reason.contains("engine 0"), "{reason}");
    }

    #[test]
    fn what_differs_is_named() {
        assert_eq!(mismatch(&state(&["m"], block::check("m", 7, 16)), 7), None);
        for (check, words) in [
            (block::check("m", 0, 16), "KVATLAS_SEED"),
            (block::check("alias", 7, 16), "\"alias\""),
            (block::check("m", 7, 32), "hashes 32 tokens"),
            (block::check("m", 8, 16), "seed or version"),
        ] {
            let reason = mismatch(&state(&["m", "alias"], check), 7).unwrap_or_default();
            assert!(reason.contains(words), "{reason}");
        }
        assert!(mismatch(&state(&[], 1), 7).is_some());
    }
}
