//! Benchmark of the index's core: `cargo run --release --bin bench_find [ENGINES] [BLOCKS]`, 64 and 50,000 by default.
//!
//! A seeded workload: engines with least-recently-used caches of BLOCKS blocks, one system prompt of 64 blocks, 64
//! applications' prompts on it, conversations that grow turn by turn and mostly stay with one engine. Everything is
//! measured in one run beside floors of the same machine; read ratios, not times. Nothing is asserted.

use harness::seeded::Seeded;
use index::shared::{Holder, Limits, Reader, Writer, open};
use proto::id::SetKind;
use std::collections::{BTreeMap, HashMap};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Log-uniform from `low` to `high`.
fn log(rng: &mut Seeded, low: f64, high: f64) -> usize {
    let unit = (rng.word() >> 11) as f64 / (1u64 << 53) as f64;
    (low.ln() + unit * (high.ln() - low.ln())).exp() as usize
}

/// Blocks of a thing, by number: the same for everybody.
fn blocks(thing: u64, range: std::ops::Range<usize>) -> Vec<u64> {
    range.map(|at| Seeded::new(thing.wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ at as u64).word() | 1).collect()
}

/// One change of one engine's set.
struct Change {
    engine: usize,
    store: bool,
    fingerprints: Vec<u64>,
}

#[derive(Default)]
struct Cache {
    /// Thing -> (time of use, blocks held).
    held: HashMap<u64, (u64, usize)>,
    by_use: BTreeMap<u64, u64>,
    used: usize,
}

struct Conversation {
    app: u64,
    thing: u64,
    len: usize,
    target: usize,
    home: usize,
}

struct World {
    rng: Seeded,
    caches: Vec<Cache>,
    capacity: usize,
    apps: Vec<usize>,
    open: Vec<Conversation>,
    time: u64,
    next: u64,
    prompts: Vec<Vec<u64>>,
}

const SYSTEM: usize = 64;
const APPS: u64 = 64;

impl World {
    fn new(engines: usize, capacity: usize) -> World {
        let mut rng = Seeded::new(1);
        let apps = (0..APPS).map(|_| log(&mut rng, 16.0, 512.0)).collect();
        let caches = (0..engines).map(|_| Cache::default()).collect();
        let mut world = World { rng, caches, capacity, apps, open: vec![], time: 0, next: 1000, prompts: vec![] };
        for _ in 0..engines * 4 {
            let conversation = world.converse();
            world.open.push(conversation);
        }
        world
    }

    fn converse(&mut self) -> Conversation {
        self.next += 1;
        let app = (log(&mut self.rng, 1.0, APPS as f64 + 1.0) as u64 - 1).min(APPS - 1);
        let target = log(&mut self.rng, 16.0, 8192f64.min(self.capacity as f64 / 2.0));
        let home = self.rng.below(self.caches.len());
        Conversation { app, thing: self.next, len: 0, target, home }
    }

    /// `thing` is used on `engine` up to `len` blocks, stored `chunk` blocks a step; others make room, tail first.
    fn hold(&mut self, engine: usize, thing: u64, len: usize, chunk: usize, out: &mut Vec<Change>) {
        self.time += 1;
        let cache = &mut self.caches[engine];
        let (used, mut have) = cache.held.get(&thing).copied().unwrap_or((self.time, 0));
        cache.by_use.remove(&used);
        cache.by_use.insert(self.time, thing);
        cache.held.insert(thing, (self.time, have));
        while have < len {
            let step = chunk.min(len - have);
            while cache.used + step > self.capacity {
                let Some((&at, &oldest)) = cache.by_use.iter().next() else { break };
                let Some((_, blocks_held)) = cache.held.get_mut(&oldest) else { break };
                let gone = (*blocks_held).min(cache.used + step - self.capacity);
                let mut fingerprints = blocks(oldest, *blocks_held - gone..*blocks_held);
                fingerprints.reverse();
                *blocks_held -= gone;
                if *blocks_held == 0 {
                    cache.held.remove(&oldest);
                    cache.by_use.remove(&at);
                }
                cache.used -= gone;
                out.push(Change { engine, store: false, fingerprints });
            }
            out.push(Change { engine, store: true, fingerprints: blocks(thing, have..have + step) });
            have += step;
            cache.used += step;
            cache.held.insert(thing, (self.time, have));
        }
    }

    /// One request: its prompt is prefilled, its answer decoded block by block.
    fn request(&mut self, out: &mut Vec<Change>) {
        let at = self.rng.below(self.open.len());
        if self.rng.below(20) == 0 {
            self.open[at].home = self.rng.below(self.caches.len());
        }
        let Conversation { app, thing, len, target, home } = self.open[at];
        let more = if len == 0 { log(&mut self.rng, 8.0, target.max(9) as f64) } else { 8 + self.rng.below(57) };
        let app_len = self.apps[app as usize];
        let mut prompt = blocks(0, 0..SYSTEM);
        prompt.extend(blocks(1 + app, 0..app_len));
        prompt.extend(blocks(thing, 0..len + more));
        if self.prompts.len() < 4000 {
            self.prompts.push(prompt);
        } else {
            let place = self.rng.below(4000);
            self.prompts[place] = prompt;
        }
        let answer = 4 + self.rng.below(29);
        self.hold(home, thing, len.max(1), 512, out);
        self.hold(home, 1 + app, app_len, 512, out);
        self.hold(home, 0, SYSTEM, 512, out);
        self.hold(home, thing, len + more, 512, out);
        self.hold(home, thing, len + more + answer, 1, out);
        self.open[at].len += more + answer;
        if self.open[at].len >= target {
            self.open[at] = self.converse();
        }
    }

    /// Requests until `count` blocks have changed.
    fn changes(&mut self, count: usize) -> Vec<Change> {
        let (mut out, mut from, mut sum) = (vec![], 0, 0);
        while sum < count {
            self.request(&mut out);
            sum += out[from..].iter().map(|change: &Change| change.fingerprints.len()).sum::<usize>();
            from = out.len();
        }
        out
    }
}

/// Has `value` computed, and nothing more.
fn keep<T>(value: T) {
    black_box(value);
}

/// Applies changes: blocks and seconds.
fn apply(writer: &mut Writer, holders: &[Holder], changes: &[Change]) -> (usize, f64) {
    let begin = Instant::now();
    let mut count = 0;
    for Change { engine, store, fingerprints } in changes {
        count += fingerprints.len();
        let holder = holders[*engine];
        let done = if *store { writer.store(holder, fingerprints) } else { writer.remove(holder, fingerprints) };
        black_box(done.is_ok());
    }
    (count, begin.elapsed().as_secs_f64())
}

/// p50 and p99 in nanoseconds of `run`, called `times` times.
fn time(times: usize, mut run: impl FnMut(usize)) -> (u64, u64) {
    let mut all: Vec<u64> = Vec::with_capacity(times);
    for at in 0..times {
        let begin = Instant::now();
        run(at);
        all.push(begin.elapsed().as_nanos() as u64);
    }
    all.sort_unstable();
    (all[times / 2], all[times * 99 / 100])
}

fn row(name: &str, (p50, p99): (u64, u64)) {
    println!("{name:<52} {p50:>8} {p99:>8}");
}

fn lookups(name: &str, reader: &mut Reader, prompts: &[Vec<u64>], times: usize) {
    let find = time(times, |at| drop(black_box(reader.find(&prompts[at % prompts.len()]))));
    let mut depths = vec![];
    let whole = time(times, |at| {
        reader.find(&prompts[at % prompts.len()]).depths(&mut depths);
        black_box(&depths);
    });
    row(&format!("{name}: find"), find);
    row(&format!("{name}: find and write depths out"), whole);
}

fn floors(prompts: &[Vec<u64>], engines: usize) {
    row("floor: timing nothing", time(20_000, |_| ()));
    let pairs: Vec<u64> = (0..engines as u64).collect();
    let mut copy = vec![0; engines];
    row(
        "floor: copy an answer of all engines (8 bytes each)",
        time(20_000, |_| black_box(&mut copy).copy_from_slice(black_box(&pairs))),
    );
    // A table as large as an index of this fleet would be, and probes that do not depend on each other.
    let table: Vec<[u64; 8]> = (0..1 << 20).map(|at| [at; 8]).collect();
    let probes = |prompt: &[u64], count: usize| {
        let line = |fp: &u64| table[(fp.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 44) as usize][0];
        prompt.iter().take(count).map(line).fold(0, u64::wrapping_add)
    };
    let long: Vec<Vec<u64>> = (0..500).map(|at| blocks(1 << 50 | at, 0..256)).collect();
    row("floor: 256 independent probes of 64 MiB", time(500, |at| keep(probes(&long[at], 256))));
    row("floor: 14 independent probes of 64 MiB", time(2000, |at| keep(probes(&prompts[at % prompts.len()], 14))));
    let mut at = 1;
    row(
        "floor: 14 dependent probes of 64 MiB",
        time(2000, |_| {
            for _ in 0..14 {
                at = Seeded::new(table[(at >> 44) as usize][0].wrapping_add(at)).word();
            }
            black_box(at);
        }),
    );
}

fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<usize>().expect("a number: [ENGINES] [BLOCKS]"));
    let (engines, capacity) = (args.next().unwrap_or(64), args.next().unwrap_or(50_000));
    let (mut writer, mut reader) = open(Limits { spread: Seeded::new(99).word(), ..Limits::default() });
    let holders: Vec<Holder> = (0..engines as u32)
        .map(|engine| {
            let holder = writer.open(engine, SetKind::Gpu).expect("within the default limits");
            writer.publish(holder).expect("just opened");
            holder
        })
        .collect();
    let mut world = World::new(engines, capacity);

    // Fill, then change as much again.
    let (mut fill, mut churn, total) = ((0, 0.0), (0, 0.0), engines * capacity);
    let used = |world: &World| world.caches.iter().map(|cache| cache.used).sum::<usize>();
    while used(&world) * 10 < total * 9 {
        let (count, seconds) = apply(&mut writer, &holders, &world.changes(1 << 20));
        fill = (fill.0 + count, fill.1 + seconds);
    }
    while churn.0 < total {
        let (count, seconds) = apply(&mut writer, &holders, &world.changes(1 << 20));
        churn = (churn.0 + count, churn.1 + seconds);
    }
    let rate = |(count, seconds): (usize, f64)| count as f64 / seconds / 1e6;
    println!("{engines} engines of {capacity} blocks");
    println!("ingest, M blocks/s, filling / churn                  {:>8.1} {:>8.1}", rate(fill), rate(churn));
    let stats = writer.stats();
    let held = used(&world) as f64;
    println!(
        "bytes per (block, holder), table / table and sets    {:>8.1} {:>8.1}",
        stats.table_bytes as f64 / held,
        stats.bytes() as f64 / held
    );
    println!("{stats:?}, {held} (block, holder)");

    println!("{:<52} {:>8} {:>8}", "nanoseconds", "p50", "p99");
    let prompts = std::mem::take(&mut world.prompts);
    lookups("mixed", &mut reader, &prompts, 40_000);
    for len in [256, 2048, 8192] {
        for count in [1, 8.min(engines), engines] {
            let chains: Vec<Vec<u64>> = (0..32.min((1 << 21) / len / count).max(4))
                .map(|at| blocks((7 << 40) | (len * 1000 + count * 64 + at) as u64, 0..len))
                .collect();
            for (at, chain) in chains.iter().enumerate() {
                (0..count).for_each(|nth| keep(writer.store(holders[(at + nth) % engines], chain)));
            }
            lookups(&format!("{len} blocks held by {count}"), &mut reader, &chains, 4000);
            for (at, chain) in chains.iter().enumerate() {
                let back: Vec<u64> = chain.iter().rev().copied().collect();
                (0..count).for_each(|nth| keep(writer.remove(holders[(at + nth) % engines], &back)));
            }
        }
    }
    floors(&prompts, engines);

    // One writer and one reader at once.
    let changes = world.changes(4 << 20);
    let stop = AtomicBool::new(false);
    let (wrote, seen) = std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut all = vec![];
            while !stop.load(Ordering::Relaxed) {
                let begin = Instant::now();
                drop(black_box(reader.find(&prompts[all.len() % prompts.len()])));
                all.push(begin.elapsed().as_nanos() as u64);
            }
            all.sort_unstable();
            all
        });
        let wrote = apply(&mut writer, &holders, &changes);
        stop.store(true, Ordering::Relaxed);
        (wrote, reading.join().expect("the reader"))
    });
    row("mixed: find, beside a writer", (seen[seen.len() / 2], seen[seen.len() * 99 / 100]));
    println!(
        "at once, M blocks/s written / k lookups/s            {:>8.1} {:>8.1}",
        rate(wrote),
        seen.len() as f64 / wrote.1 / 1e3
    );

    // What leaves: a purge of half the fleet, swept in steps.
    let begin = Instant::now();
    holders.iter().step_by(2).for_each(|holder| keep(writer.retire(*holder)));
    let mut longest = 0;
    let mut more = true;
    while more {
        let step = Instant::now();
        more = writer.sweep(1 << 14);
        longest = longest.max(step.elapsed().as_micros());
    }
    println!(
        "purge half the fleet, ms / longest step, us          {:>8.1} {:>8}",
        begin.elapsed().as_secs_f64() * 1e3,
        longest
    );
    println!("{:?}", writer.stats());
}
