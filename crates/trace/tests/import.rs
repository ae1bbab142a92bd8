//! Formats are told by content, and several files become ranks of one run.

use std::path::PathBuf;

use strobe_trace::import::read_files;

#[test]
fn two_ranks_of_a_real_run() {
    let Some(data) = std::env::var_os("STROBE_TEST_DATA").map(PathBuf::from) else {
        println!("skipped: STROBE_TEST_DATA is not set");
        return;
    };
    let file = |rank: u32| data.join(format!("traces/kineto/hta/sampled_rank-{rank}.json.gz"));
    let mut last = (0, 0);
    let both = read_files(&[file(0), file(1)], &mut |p| {
        assert!(p.done_bytes >= last.0 && p.done_bytes <= p.total_bytes);
        last = (p.done_bytes, p.total_bytes);
    })
    .unwrap();
    assert_eq!(last.0, last.1);
    let alone = [0, 1].map(|rank| read_files(&[file(rank)], &mut |_| {}).unwrap());
    assert_eq!(both.ops.len(), alone[0].ops.len() + alone[1].ops.len());
    assert_eq!(both.ops_without_launch(), 0);
    assert_eq!(both.processes.iter().map(|p| p.rank).collect::<Vec<_>>(), [Some(0), Some(1)]);
    assert_eq!(both.devices.iter().map(|d| (d.ordinal, d.source)).collect::<Vec<_>>(), [(0, 0), (1, 1)]);
    for (rank, alone) in alone.iter().enumerate() {
        let names = |trace: &strobe_trace::Trace, process: Option<u16>| {
            let ops = (0..trace.ops.len()).filter(|&i| process.is_none_or(|p| trace.ops.process[i] == p));
            ops.map(|i| (trace.ops.start[i], trace.op_name(i).to_string())).collect::<Vec<_>>()
        };
        let (mut merged, mut single) = (names(&both, Some(rank as u16)), names(alone, None));
        merged.sort();
        single.sort();
        assert_eq!(merged, single);
    }
    let error = read_files(&[file(0), file(0)], &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("given twice"), "{error}");
}
