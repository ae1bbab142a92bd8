//! `strobe completions`: what a shell needs to complete strobe's command lines.

use anyhow::Result;
use clap_complete::Shell;

use crate::output;

const EXAMPLES: &str = "EXAMPLES:
  strobe completions bash > ~/.local/share/bash-completion/completions/strobe
  strobe completions zsh > ~/.zfunc/_strobe
  strobe completions fish > ~/.config/fish/completions/strobe.fish";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(crate) struct Args {
    /// Whose completions to print
    #[arg(value_enum)]
    shell: Shell,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::command(), "strobe", &mut script);
    output::print(&String::from_utf8_lossy(&script));
    Ok(())
}
