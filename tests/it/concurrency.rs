//! Readers beside a writer: each answer is held against the promise of the index.
//!
//! The writer notes, on one logical clock, between which ticks each membership began and ended; readers note the ticks
//! around each lookup and what was answered. Afterwards every answer is judged both ways. Not too much: whoever was
//! answered with depth `d` was live, held block `d - 1` and held block 0 at some instant of the lookup. Not too
//! little: who was live and held the first `k` blocks all through the lookup was answered, once, with `k` or more.

use harness::seeded::Seeded;
use index::shared::{Held, Holder, Limits, Reader, Writer, open};
use proto::id::SetKind;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// When something was so: surely not before `before`, surely from `since` to `until`, surely not after `after`.
#[derive(Clone, Copy, Debug)]
struct Span {
    before: u64,
    since: u64,
    until: u64,
    after: u64,
}

impl Span {
    fn from(op: (u64, u64)) -> Span {
        Span { before: op.0, since: op.1, until: u64::MAX, after: u64::MAX }
    }

    /// May it have been so at some instant of the lookup?
    fn touches(&self, look: &Look) -> bool {
        self.before < look.end && self.after >= look.begin
    }

    /// Was it so all through the lookup?
    fn covers(&self, look: &Look) -> bool {
        self.since < look.begin && self.until >= look.end
    }
}

/// One generation of one set.
struct Life {
    held: Held,
    live: Option<Span>,
    members: HashMap<u64, Vec<Span>>,
    /// Blocks of each prompt.
    depths: Vec<usize>,
}

struct Look {
    begin: u64,
    end: u64,
    prompt: usize,
    found: Vec<(Held, u32)>,
}

const ENGINES: usize = 24;
const PROMPTS: usize = 40;
const BLOCKS: usize = 24;

struct Work<'a> {
    writer: Writer,
    clock: &'a AtomicU64,
    prompts: &'a [Vec<u64>],
    lives: Vec<Life>,
    rng: Seeded,
}

impl Work<'_> {
    fn timed<T>(&mut self, op: impl FnOnce(&mut Writer) -> T) -> ((u64, u64), T) {
        let before = self.clock.fetch_add(1, Ordering::SeqCst);
        let result = op(&mut self.writer);
        ((before, self.clock.fetch_add(1, Ordering::SeqCst)), result)
    }

    fn open(&mut self, held: Held) -> Option<(Holder, usize)> {
        let holder = self.writer.open(held.engine, held.kind).ok()?;
        self.lives.push(Life { held, live: None, members: HashMap::new(), depths: vec![0; PROMPTS] });
        Some((holder, self.lives.len() - 1))
    }

    fn store(&mut self, (holder, life): (Holder, usize), prompt: usize, blocks: usize) {
        let from = self.lives[life].depths[prompt];
        let to = (from + blocks).min(BLOCKS);
        let new = &self.prompts[prompt][from..to];
        let (op, result) = self.timed(|writer| writer.store(holder, new));
        assert_eq!(result.map(|changed| changed.unchanged), Ok(0));
        let life = &mut self.lives[life];
        life.depths[prompt] = to;
        new.iter().for_each(|fp| life.members.entry(*fp).or_default().push(Span::from(op)));
    }

    fn remove(&mut self, (holder, life): (Holder, usize), prompt: usize, blocks: usize) {
        let from = self.lives[life].depths[prompt];
        let to = from.saturating_sub(blocks);
        let gone: Vec<u64> = self.prompts[prompt][to..from].iter().rev().copied().collect();
        let (op, result) = self.timed(|writer| writer.remove(holder, &gone));
        assert_eq!(result.map(|changed| changed.unchanged), Ok(0));
        let life = &mut self.lives[life];
        life.depths[prompt] = to;
        for fp in gone {
            if let Some(span) = life.members.get_mut(&fp).and_then(|spans| spans.last_mut()) {
                (span.until, span.after) = op;
            }
        }
    }

    fn publish(&mut self, (holder, life): (Holder, usize), old: Option<usize>) {
        let (op, result) = self.timed(|writer| writer.publish(holder));
        assert_eq!(result.map(|old| old.is_some()), Ok(old.is_some()));
        self.lives[life].live = Some(Span::from(op));
        if let Some(span) = old.and_then(|old| self.lives[old].live.as_mut()) {
            (span.until, span.after) = op;
        }
    }

    fn run(&mut self, steps: usize) {
        let kind = |at: usize| if at.is_multiple_of(2) { SetKind::Gpu } else { SetKind::Any };
        let mut current: Vec<(Holder, usize)> = vec![];
        for at in 0..ENGINES {
            let opened = self.open(Held { engine: at as u32 / 2, kind: kind(at) }).expect("room");
            self.publish(opened, None);
            current.push(opened);
        }
        let noise = self.writer.open(ENGINES as u32, SetKind::Gpu).expect("room");
        for step in 0..steps {
            let (at, prompt, blocks) = (self.rng.below(ENGINES), self.rng.below(PROMPTS), 1 + self.rng.below(6));
            match self.rng.below(100) {
                0..55 => self.store(current[at], prompt, blocks),
                55..97 => self.remove(current[at], prompt, blocks * 2),
                _ => {
                    // A restart: another generation, filled while hidden, takes the place at once.
                    let held = self.lives[current[at].1].held;
                    let Some(new) = self.open(held) else { continue };
                    for _ in 0..12 {
                        let prompt = self.rng.below(PROMPTS);
                        self.store(new, prompt, BLOCKS);
                    }
                    self.publish(new, Some(current[at].1));
                    current[at] = new;
                }
            }
            self.writer.sweep(400);
            if step % 2000 == 0 {
                // Segments split, the directory doubles; and all of it back.
                let many: Vec<u64> = (0..20_000).map(|_| self.rng.word() | 1).collect();
                self.writer.store(noise, &many).expect("hidden");
                self.writer.remove(noise, &many).expect("hidden");
            }
        }
    }
}

fn read(reader: &mut Reader, seed: u64, clock: &AtomicU64, stop: &AtomicBool, prompts: &[Vec<u64>]) -> Vec<Look> {
    let mut rng = Seeded::new(seed);
    let mut looks = vec![];
    while !stop.load(Ordering::Relaxed) {
        let prompt = rng.below(PROMPTS);
        let begin = clock.load(Ordering::SeqCst);
        let answer = reader.find(&prompts[prompt]);
        let end = clock.load(Ordering::SeqCst);
        let found: Vec<(Held, u32)> = answer.iter().collect();
        // What was answered is only worth judging where the writer was at work; a sample of the rest.
        if begin != end || rng.below(64) == 0 {
            looks.push(Look { begin, end: end.max(begin + 1), prompt, found });
        }
    }
    looks
}

fn judge(looks: &[Look], lives: &[Life], prompts: &[Vec<u64>]) -> Result<u64, String> {
    let mut by_held: HashMap<Held, Vec<&Life>> = HashMap::new();
    lives.iter().for_each(|life| by_held.entry(life.held).or_default().push(life));
    let mut judged = 0;
    for look in looks {
        let prompt = &prompts[look.prompt];
        for (held, depth) in &look.found {
            let member = |life: &Life, block: usize| {
                life.members.get(&prompt[block]).is_some_and(|spans| spans.iter().any(|span| span.touches(look)))
            };
            let so = |life: &&&Life| {
                life.live.is_some_and(|live| live.touches(look)) && member(life, 0) && member(life, *depth as usize - 1)
            };
            if by_held[held].iter().find(so).is_none() {
                return Err(format!(
                    "{held:?} had no block {depth} of prompt {} in {}..{}",
                    look.prompt, look.begin, look.end
                ));
            }
            judged += 1;
        }
        for (held, lives) in &by_held {
            let answered: Vec<u32> = look.found.iter().filter(|found| found.0 == *held).map(|found| found.1).collect();
            if answered.len() > 1 {
                return Err(format!("{held:?} was answered {} times", answered.len()));
            }
            for life in lives.iter().filter(|life| life.live.is_some_and(|live| live.covers(look))) {
                let stable = |fp: &&u64| life.members.get(fp).is_some_and(|spans| spans.iter().any(|s| s.covers(look)));
                let sure = prompt.iter().take_while(stable).count();
                if answered.first().map_or(0, |depth| *depth as usize) < sure {
                    return Err(format!("{held:?} had {sure} blocks of {}, answered {answered:?}", look.prompt));
                }
            }
        }
    }
    Ok(judged)
}

#[test]
fn the_promise_holds_beside_a_writer() {
    for seed in [11, 12] {
        let mut rng = Seeded::new(seed);
        let prompts: Vec<Vec<u64>> = (0..PROMPTS).map(|_| (0..BLOCKS).map(|_| rng.word() | 1).collect()).collect();
        let (writer, reader) = open(Limits { engines: 64, holders: 48, spread: seed });
        let (clock, stop) = (AtomicU64::new(1), AtomicBool::new(false));
        let mut work = Work { writer, clock: &clock, prompts: &prompts, lives: vec![], rng };
        let looks: Vec<Look> = std::thread::scope(|scope| {
            let reading: Vec<_> = (0..2)
                .map(|at| {
                    let (mut reader, clock, stop, prompts) = (reader.clone(), &clock, &stop, &prompts);
                    scope.spawn(move || read(&mut reader, seed * 10 + at, clock, stop, prompts))
                })
                .collect();
            // Readers must stop also when the writer fails.
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work.run(6000)));
            stop.store(true, Ordering::Relaxed);
            done.unwrap_or_else(|fault| std::panic::resume_unwind(fault));
            reading.into_iter().flat_map(|reading| reading.join().expect("a reader")).collect()
        });
        let judged = judge(&looks, &work.lives, &prompts).unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
        assert!(looks.iter().any(|look| look.end > look.begin + 1), "seed {seed}: no lookup ran beside the writer");
        assert!(judged > 1000, "seed {seed}: {judged} answers judged");
    }
}

#[test]
fn what_an_answer_shows_outlives_the_writer() {
    let (mut writer, mut reader) = open(Limits::default());
    let holder = writer.open(3, SetKind::Gpu).expect("room");
    writer.store(holder, &[1, 2, 3]).expect("hidden");
    writer.publish(holder).expect("hidden");
    let answer = reader.find(&[1, 2, 4]);
    // The clear retires what the answer shows; dropping the writer must not free it.
    writer.clear(holder).expect("live");
    writer.sweep(1000);
    drop(writer);
    assert_eq!(answer.iter().collect::<Vec<_>>(), [(Held { engine: 3, kind: SetKind::Gpu }, 2)]);
    drop(answer);
    assert_eq!(reader.find(&[1, 2, 4]).iter().count(), 0);
}
