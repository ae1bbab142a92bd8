//! `strobe man`: manual pages, one for each verb.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap_mangen::Man;

use crate::{output, run_dir};

const EXAMPLES: &str = "EXAMPLES:
  strobe man --output-dir ~/.local/share/man/man1        then: man strobe, man strobe-bench-throughput";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(crate) struct Args {
    /// Directory to write into; made if it is not there
    #[arg(long, value_name = "DIR")]
    output_dir: PathBuf,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let dir = &args.output_dir;
    fs::create_dir_all(dir).with_context(|| format!("--output-dir: cannot make {}", dir.display()))?;
    let mut command = crate::command();
    command.build();
    let pages = write(&command, "strobe", dir)?;
    output::line(&format!(
        "{}: {pages} pages; read them with `man -l {}`",
        dir.display(),
        dir.join("strobe.1").display()
    ));
    Ok(())
}

/// Writes the page of a command and those of the verbs under it; returns how many.
fn write(command: &clap::Command, name: &str, dir: &Path) -> Result<usize> {
    let mut page = Vec::new();
    // clap keeps names for as long as the program runs.
    let named: &'static str = name.to_owned().leak();
    Man::new(command.clone().name(named)).render(&mut page)?;
    run_dir::write_whole(&dir.join(format!("{name}.1")), &page)?;
    let verbs = command.get_subcommands().filter(|verb| !verb.is_hide_set() && verb.get_name() != "help");
    verbs.map(|verb| write(verb, &format!("{name}-{}", verb.get_name()), dir)).sum::<Result<usize>>().map(|n| n + 1)
}
