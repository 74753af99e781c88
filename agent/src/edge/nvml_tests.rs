//! NVML against a library of the same name that is compiled here.

use super::*;
use crate::gpus::NVML;
use proto::event::Gpus;
use std::cell::RefCell;
use std::path::PathBuf;
use std::process::Command;
use std::rc::Rc;

/// Compiles the fake in one of its modes, and leaves it in a folder that is removed with the value.
struct Fake(PathBuf);

impl Fake {
    fn of(mode: u32) -> Result<Self, Box<dyn std::error::Error>> {
        let folder = std::env::temp_dir().join(format!("kvatlas-nvml-{}-{mode}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/edge/nvml_fake.c");
        let library = folder.join(NVML);
        let done = Command::new("cc")
            .args(["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", &format!("-DMODE={mode}"), "-o"])
            .arg(&library)
            .arg(source)
            .status()?;
        if done.success() { Ok(Self(library)) } else { Err("the C compiler failed".into()) }
    }

    fn path(&self) -> String {
        self.0.display().to_string()
    }

    fn open(&self, cuda: Option<&str>) -> Result<Source, NvmlError> {
        let visible = Visible { cuda: cuda.map(String::from), nvidia: None };
        Source::open(&self.path(), &visible, &Share::default())
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        if let Some(folder) = self.0.parent() {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

type Tested = Result<(), Box<dyn std::error::Error>>;

#[test]
fn gpus_are_read_the_worst_counts() -> Tested {
    let fake = Fake::of(0)?;
    let mut source = fake.open(None)?;
    let (measured, fault) = source.read();
    let gpus = Gpus {
        count: 2,
        memory_use: 0.9,
        temperature_c: 86,
        throttled: vec!["thermal".into()],
        ecc_corrected: 7,
        ecc_uncorrected: 2,
        ..Gpus::default()
    };
    assert_eq!(measured, Some(Measured { utilization: Some(0.6), gpus }));
    assert!(fault.is_none(), "what is not supported is no fault: {fault:?}");
    let later = source.read().0.map(|m| (m.gpus.ecc_uncorrected, m.gpus.ecc_new));
    assert_eq!(later, Some((3, 1)));
    let one = fake.open(Some("GPU-aa"))?.read().0.map(|m| (m.gpus.count, m.gpus.temperature_c, m.utilization));
    assert_eq!(one, Some((1, 60, Some(0.4))));
    assert_eq!(fake.open(Some(""))?.read().0, None);
    Ok(())
}

#[test]
fn a_bad_library_does_no_harm() -> Tested {
    assert!(Source::open("/nowhere/libnvidia-ml.so.1", &Visible::default(), &Share::default()).is_err());
    assert!(matches!(Fake::of(1)?.open(None).err(), Some(NvmlError::DriverNotLoaded)));
    let unknown = Gpus { count: 2, ..Gpus::default() };
    for mode in [2, 3] {
        let (measured, fault) = Fake::of(mode)?.open(None)?.read();
        assert_eq!(measured, Some(Measured { utilization: None, gpus: unknown.clone() }), "mode {mode}");
        assert_eq!(fault.is_some(), mode == 3);
    }
    let (lost, _) = Fake::of(4)?.open(None)?.read();
    assert_eq!(lost.map(|m| (m.gpus.lost, m.gpus.temperature_c)), Some((1, 60)));
    let (few, fault) = Fake::of(6)?.open(None)?.read();
    assert_eq!(few.map(|m| m.gpus), Some(Gpus { temperature_c: 86, ..unknown }));
    assert!(fault.is_none(), "a driver that lacks a function: {fault:?}");
    Ok(())
}

#[test]
fn a_library_that_hangs_holds_nothing_up() -> Tested {
    let fake = Fake::of(5)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(2).build()?;
    let taken = Rc::new(RefCell::new(Vec::new()));
    let seen = runtime.block_on(async {
        let (path, told) = (fake.path(), taken.clone());
        let reading = watch(path, Visible::default(), Share::default(), move |m| told.borrow_mut().push(m));
        let meanwhile = async {
            // This thread goes on, and the other blocking thread is free.
            while taken.borrow().is_empty() {
                sleep(Duration::from_millis(10)).await;
            }
            spawn_blocking(|| 7).await.unwrap_or(0)
        };
        tokio::select! {
            () = reading => 0,
            seen = meanwhile => seen,
        }
    });
    runtime.shutdown_background();
    assert_eq!((seen, &taken.borrow()[..]), (7, &[None][..]));
    Ok(())
}
