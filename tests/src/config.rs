//! Where things are on this machine. The only place of the harness that reads the environment.

use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Places that a run uses.
#[derive(Debug, Clone)]
pub struct Places {
    /// The repository.
    pub root: PathBuf,
    /// Where cargo puts programs of this build: `kvatlas-index` and `kvatlas-picker` are here, beside ourselves.
    pub programs: PathBuf,
    /// Private to the end-to-end runs: environment, model, wheels, logs. `KVATLAS_E2E_DIR`, else `target/e2e`.
    pub e2e: PathBuf,
    /// `cargo`, as the one that started us.
    pub cargo: OsString,
    /// `PATH`, to look for Python.
    path: OsString,
}

impl Places {
    /// Reads the environment.
    ///
    /// # Errors
    /// When the program's own path is unknown or `KVATLAS_E2E_DIR` is not absolute.
    pub fn from_env() -> Result<Places> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the harness has no parent folder")?;
        let program = std::env::current_exe().context("the path of this program is unknown")?;
        let folder = program.parent().context("this program is in no folder")?;
        // A program is in <target>/<profile>, a test in <target>/<profile>/deps.
        let programs = if folder.ends_with("deps") { folder.parent().context("deps is in no folder")? } else { folder };
        let programs = programs.to_path_buf();
        let e2e = match std::env::var_os("KVATLAS_E2E_DIR") {
            Some(given) => PathBuf::from(given),
            None => programs.parent().context("this program is not in a target folder")?.join("e2e"),
        };
        if !e2e.is_absolute() {
            bail!("KVATLAS_E2E_DIR is {}: give an absolute path", e2e.display());
        }
        Ok(Places {
            root: root.to_path_buf(),
            programs,
            e2e,
            cargo: std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()),
            path: std::env::var_os("PATH").unwrap_or_default(),
        })
    }

    /// The Python of the private environment.
    pub fn python(&self) -> PathBuf {
        self.e2e.join("venv/bin/python")
    }

    /// A script of `tests/e2e`.
    pub fn script(&self, name: &str) -> PathBuf {
        self.root.join("tests/e2e").join(name)
    }

    /// The folder of the demo's model.
    pub fn model(&self) -> PathBuf {
        self.e2e.join("model")
    }

    /// The folder of the logs of all processes.
    pub fn logs(&self) -> PathBuf {
        self.e2e.join("logs")
    }

    /// Programs on `PATH` with one of these names, the first name first.
    pub fn on_path(&self, names: &[&str]) -> Vec<PathBuf> {
        let folders: Vec<PathBuf> = std::env::split_paths(&self.path).collect();
        names.iter().flat_map(|name| folders.iter().map(move |f| f.join(name))).filter(|p| p.is_file()).collect()
    }
}
