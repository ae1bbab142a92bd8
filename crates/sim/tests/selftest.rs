//! The queueing oracles, at a size for every build. `strobe simulate selftest` runs more of the same.

use strobe_sim::selftest;

#[test]
fn theory_and_simulation_agree() {
    let report = selftest::run(30, 3_000, 7, 2, &|| {}).unwrap();
    let said: Vec<String> = report
        .checks
        .iter()
        .map(|c| format!("{:60} {:10.6} {:10.6} z {:6.2}", c.name, c.expected, c.measured, c.z))
        .collect();
    assert!(report.passed, "{:?}\n{}", report.above_two, said.join("\n"));
    assert!(report.checks.len() >= 30);
}
