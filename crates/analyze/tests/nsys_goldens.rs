//! The summaries against what `nsys stats` printed for captures with threads, domains, odd ranges and CUDA graphs.

use std::path::Path;

use strobe_analyze::nsys_stats;

#[test]
fn summaries_equal_nsys_stats() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/nsys");
    let mut compared = 0;
    for mode in ["node", "graph"] {
        let path = data.join(format!("mixed_{mode}.sqlite"));
        let trace = strobe_trace::import::read_files(&[path], &mut |_| ()).unwrap();
        for name in nsys_stats::names() {
            let nsys_name = match name {
                "kern-sum" => "cuda_gpu_kern_sum".to_owned(),
                "api-sum" => "cuda_api_sum".to_owned(),
                "gpu-sum" => "cuda_gpu_sum".to_owned(),
                "mem-time-sum" => "cuda_gpu_mem_time_sum".to_owned(),
                "mem-size-sum" => "cuda_gpu_mem_size_sum".to_owned(),
                other => other.replace('-', "_"),
            };
            let golden = std::fs::read_to_string(data.join(format!("mixed_{mode}_{nsys_name}.csv"))).unwrap();
            let report = nsys_stats::report(name, &trace).unwrap();
            assert_eq!(nsys_stats::csv(&report), golden, "{name} of mixed_{mode}");
            compared += 1;
        }
    }
    assert_eq!(compared, 18);
}
