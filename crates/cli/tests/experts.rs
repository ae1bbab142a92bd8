//! The load of experts and the perfect router, from options to files.

mod common;

use common::{Sandbox, assert_names, int, ints, num};

const LENGTHS: [(usize, usize); 6] = [(40, 9), (7, 12), (65, 4), (1, 15), (33, 2), (20, 20)];
/// What everything made with the perfect router must say.
const WRONG: &str = "wrong by design";

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &LENGTHS);
    sandbox
}

/// `--model moe-tiny` has 4 layers of 8 experts, 2 per token.
const LAYERS: usize = 4;

#[test]
fn loads_add_up_in_every_file() {
    let sandbox = sandbox();
    let done =
        sandbox.ok("bench throughput --model moe-tiny --dataset d.jsonl --output-dir run --profile 1-3 --assume-ep 4");
    assert_names(&done.stdout, &["EXPERT LOAD", "Ranks if 4 GPUs"]);
    assert!(!done.stdout.contains(WRONG) && !sandbox.read("run/report.html").contains(WRONG));
    let tokens: usize = LENGTHS.iter().map(|(input, output)| input + output - 1).sum();
    let report = sandbox.json("run/report.json");
    let layers = report.pointer("/strobe/experts/layers").unwrap().as_array().unwrap();
    assert_eq!(layers.len(), LAYERS);
    for layer in layers {
        assert_eq!(ints(layer, "/tokens_per_expert").iter().sum::<u64>() as usize, 2 * tokens);
        assert_eq!(ints(layer, "/tokens_per_rank").iter().sum::<u64>() as usize, 2 * tokens);
        assert!(num(layer, "/step_imbalance") >= 1.0 && num(layer, "/entropy") <= 1.0);
    }
    for line in sandbox.json_lines("run/iterations.jsonl") {
        let loads = line.pointer("/strobe/experts").unwrap().as_array().unwrap();
        let batching = line.get("inflightBatchingStats").unwrap();
        let step = int(batching, "/numCtxTokens") + int(batching, "/numGenRequests");
        assert_eq!(loads.len(), LAYERS);
        assert!(loads.iter().all(|load| ints(load, "/tokensPerExpert").iter().sum::<u64>() == 2 * step));
    }
    assert!(sandbox.read("run/experts.svg").starts_with("<svg"));
    assert!(std::fs::read(sandbox.path("run/experts.png")).unwrap().starts_with(b"\x89PNG"));
    let analysed = sandbox.ok("analyze run --report experts --format json");
    assert_names(&analysed.stdout, &["Rank max/mean per iteration"]);
}

#[test]
fn the_perfect_router_says_everywhere_that_output_is_wrong() {
    let sandbox = sandbox();
    let done = sandbox.ok(
        "bench throughput --model moe-tiny --dataset d.jsonl --output-dir run --profile 1-3 --perfect-router --assume-ep 4 --request-json r.json",
    );
    for file in ["run.json", "report.json", "report.html", "trace.html"] {
        assert!(sandbox.read(&format!("run/{file}")).contains(WRONG), "{file}");
    }
    for file in ["run/requests.jsonl", "run/iterations.jsonl"] {
        assert!(sandbox.read(file).lines().all(|line| line.contains(WRONG)), "{file}");
    }
    let requests = sandbox.json("r.json");
    assert!(requests.as_array().unwrap().iter().all(|request| request.to_string().contains(WRONG)));
    assert!(done.stdout.contains(WRONG) && done.stderr.contains(WRONG));
    let report = sandbox.json("run/report.json");
    assert_eq!(report.pointer("/strobe/perfect_router/method").unwrap(), "Renormalize");
    for line in sandbox.json_lines("run/iterations.jsonl") {
        for load in line.pointer("/strobe/experts").unwrap().as_array().unwrap() {
            for loads in [ints(load, "/tokensPerExpert"), ints(load, "/tokensPerRank")] {
                assert!(loads.iter().max().unwrap() - loads.iter().min().unwrap() <= 1, "{loads:?}");
            }
        }
    }
}

#[test]
fn moe_balance_answers() {
    let sandbox = sandbox();
    let done = sandbox.ok(
        "bench moe-balance --model moe-tiny --router-skew zipf:1.5 --dataset d.jsonl --repeat 2 --assume-ep 2 --threshold 99% --output-dir out",
    );
    let headings = ["IS THE ROUTER THE BOTTLENECK?", "on 2 assumed ranks", "95 % CI", WRONG, "KERNEL BY KERNEL"];
    assert_names(&done.stdout, &headings);
    let answer = sandbox.json("out/balance.json");
    // The threshold applies to both parts together, each of which has its name.
    let part = |name: &str| num(&answer, &format!("/answer/{name}"));
    let sum = part("computed_from_rank_load") + part("measured_on_one_device");
    assert!((part("gain") - sum).abs() < 1e-9, "{answer:#}");
    let figure = |name: &str| num(&answer, &format!("/figures/0/{name}"));
    assert_eq!(part("measured_on_one_device"), figure("gain"));
    let ratio = figure("perfect_geometric_mean") / figure("learned_geometric_mean");
    assert!((figure("gain") - (ratio - 1.0)).abs() < 1e-12);
    // The recorded pair has no verdict of its own, in no form.
    assert!(answer.pointer("/recorded_pair/groups").is_some() && answer.pointer("/recorded_pair/verdict").is_none());
    let page = sandbox.read("out/compare.html");
    assert!(page.contains("Gain on 2 assumed ranks") && !page.contains("Verdict on iterations"));
    assert!(!done.stdout.contains("Outcome"), "{}", done.stdout);
    assert_eq!((int(&answer, "/pairs"), num(&answer, "/threshold")), (2, 0.99));
    let verdict = answer.get("verdict").unwrap().as_str().unwrap();
    assert!(["significant", "not significant", "undecided"].contains(&verdict), "{verdict}");
    assert!(num(&answer, "/gain_by_rank_load_alone") > 0.0, "a skewed router fills one rank");
    let imbalance = |side: &str, layer: usize| num(&answer, &format!("/{side}/layers/{layer}/step_imbalance"));
    assert!((0..LAYERS).all(|layer| imbalance("learned", layer) > imbalance("perfect", layer)));
    assert_eq!(
        sandbox.names("out"),
        [
            "balance.json",
            "balance.txt",
            "compare.html",
            "learned-experts.png",
            "learned-experts.svg",
            "learned.sqlite",
            "perfect-experts.png",
            "perfect-experts.svg",
            "perfect.sqlite"
        ]
    );
    sandbox.ok("compare out/learned.sqlite out/perfect.sqlite");
}

#[test]
fn moe_plan_shows_loads_and_names_what_it_can_plan() {
    let sandbox = Sandbox::new();
    let plan = |words: &str| -> serde_json::Value {
        serde_json::from_str(&sandbox.ok(&format!("bench moe-plan --json {words}")).stdout).unwrap()
    };
    let flat = plan("--tokens 4 --experts 8 --top-k 2 --ep 4");
    assert_eq!(flat["senders"][1]["experts_of_tokens"].to_string(), "[[2,4],[6,1],[3,5],[7,0]]");
    assert_eq!(ints(&flat, "/sum"), [8; 4]);
    let deepseek = "--method DeepSeekV3 --tokens 100 --experts 256 --top-k 8 --ep 8 --n-group 8 --topk-group 4";
    let anchor = plan(&format!("{deepseek} --plan tensorrt-llm"));
    assert_eq!(ints(&anchor, "/senders/0/loads_of_ranks"), [200, 200, 200, 200, 0, 0, 0, 0]);
    assert_eq!(ints(&plan(deepseek), "/senders/0/loads_of_ranks"), [100; 8]);
    assert_names(&sandbox.ok("bench moe-plan --experts 8 --top-k 2 --ep 2").stdout, &["sender", "spread", "all"]);
    for (words, parts) in [
        ("--experts 8 --top-k 2 --method AdaptiveK", &["`AdaptiveK`", "Renormalize, DeepSeekV3"][..]),
        ("--experts 8 --top-k 2 --ep 3", &["8 experts", "3 expert-parallel ranks"]),
        ("--experts 8 --top-k 2 --ep 0", &["8 experts", "0 expert-parallel ranks"]),
        ("--experts 8 --top-k 9", &["num_experts_per_tok"]),
    ] {
        assert_names(&sandbox.refused(&format!("bench moe-plan {words}")), parts);
    }
}

#[test]
fn what_has_no_experts_is_refused() {
    let sandbox = sandbox();
    let call = |words: &str, wanted: &[&str]| assert_names(&sandbox.refused(words), wanted);
    call("bench throughput --model micro --dataset d.jsonl --perfect-router", &["--perfect-router", "no experts"]);
    call("bench throughput --model micro --dataset d.jsonl --assume-ep 2", &["--assume-ep", "no experts"]);
    call("bench throughput --model moe-tiny --dataset d.jsonl --assume-ep 3", &["--assume-ep", "8 experts"]);
    call("bench moe-balance --model micro --dataset d.jsonl", &["moe-balance", "no experts"]);
    call("bench moe-balance --model moe-tiny --dataset d.jsonl --eos-id 2", &["--eos-id"]);
    let balance = "bench moe-balance --model moe-tiny --dataset d.jsonl";
    for given in ["--profile 1-2", "--python x", "--streaming", "--min-tokens 4", "--trace-out t.json"] {
        call(&format!("{balance} {given}"), &[given.split(' ').next().unwrap(), "no meaning for moe-balance"]);
    }
    call(&format!("{balance} --repeat 1"), &["--repeat 1", "at least 2 pairs"]);
}
