//! Every page that strobe writes, in a real browser: the answer first, nothing cut off from a phone to a 4K screen, legible on
//! light and dark, one color per name, links that lead somewhere.

#[cfg(unix)]
#[path = "../../report/tests/browser/mod.rs"]
#[allow(dead_code)] // every test uses its own part of the browser
mod browser;
mod common;

#[cfg(unix)]
mod tests {
    use serde_json::{Value, json};

    use super::browser::Browser;
    use super::common::traces::{KINETO, MIXED_GRAPH, MIXED_NODE, real};
    use super::common::{Sandbox, num};

    const COST: &str = "--cost linear:base=2ms,per_request=10us,per_context_token=3us,per_kv_token=5ns";

    /// Opens a page that a command wrote, checks what holds for every page, and counts its links to other pages.
    fn open(sandbox: &Sandbox, file: &str, name: &str) -> Option<(Browser, usize)> {
        let mut page = Browser::open(name, &sandbox.read(file), "light")?;
        page.looks_right(name);
        let path = sandbox.path(file);
        let links = page.links_lead_to_files(path.parent().unwrap());
        page.silent();
        Some((page, links))
    }

    fn answer(page: &mut Browser) -> String {
        page.text("document.querySelector('h1').innerText")
    }

    /// A recorded run with prompts that take much longer than generation.
    fn recorded(sandbox: &Sandbox, dir: &str, options: &str) {
        sandbox.dataset("d.jsonl", &[(300, 24), (280, 20), (310, 28), (290, 24), (300, 26), (280, 24)]);
        sandbox.ok(&format!(
            "bench throughput --model micro --dataset d.jsonl --warmup 1 --max-num-tokens 320 --profile 0-30 --output-dir {dir} {options}"
        ));
    }

    /// The marks of all iterations of a kind, as shares of the height of the tallest.
    fn heights(page: &mut Browser, plot: &str, kind: &str) -> Vec<f64> {
        let script = format!(
            "(() => {{ const svg = [...document.querySelectorAll('.wide svg')].find(s => s.getAttribute('aria-label').startsWith({}));\
             const bars = [...svg.querySelectorAll('rect.hit')].filter(r => r.textContent.includes('· ' + {} + ':')).map(r => r.height.baseVal.value);\
             return bars.map(h => h / Math.max(...bars, 1)).concat(Math.max(...bars)); }})()",
            json!(plot),
            json!(kind)
        );
        serde_json::from_value(page.eval(&script)).unwrap()
    }

    #[test]
    fn the_pages_of_a_run_lead_to_each_other() {
        let sandbox = Sandbox::new();
        recorded(&sandbox, "run", "");
        let Some((mut page, links)) = open(&sandbox, "run/report.html", "report") else { return };
        assert_eq!(links, 1, "to the trace");
        let throughput = num(&sandbox.json("run/report.json"), "/performance/system_output_throughput_tok_s");
        let words = answer(&mut page);
        // Words about a busy machine come before.
        let said = words.split(" output tok/s").next().unwrap().split(' ').next_back().unwrap();
        let said = said.replace(',', "").parse::<f64>().unwrap();
        assert!((said / throughput - 1.0).abs() < 0.01, "{words}: {throughput}");
        assert!(words.contains("output tok/s") && words.contains("of the measured peak"), "{words}");

        // Generation is visible beside prompts: its bars reach up on a scale of their own.
        for kind in ["decode", "prefill"] {
            let tallest = *heights(&mut page, "Wall time of every iteration", kind).last().unwrap();
            assert!(tallest > 25.0, "{kind}: {tallest} px");
        }
        // Single iterations: a dozen at most, the others folded.
        let bars = "(svg => new Set([...svg.querySelectorAll('rect.hit')].map(r => r.getAttribute('y'))).size)\
                    ([...document.querySelectorAll('section > figure .wide svg')].find(s => s.getAttribute('aria-label').startsWith('Recorded iterations')))";
        assert!(page.number(bars) <= 12.0);
        let folded = page.text("document.querySelector('details summary').textContent");
        assert!(folded.contains("more recorded iterations"), "{folded}");
        assert_eq!(page.eval("document.querySelector('details').open"), false);
        drop(page); // there is one browser at a time

        let Some((mut page, links)) = open(&sandbox, "run/trace.html", "trace") else { return };
        assert_eq!(links, 1, "to the report");
        let words = answer(&mut page);
        let grave = ["High: ", "Medium: ", "Low: ", "Note: ", "No rule found anything"];
        assert!(grave.iter().any(|begin| words.starts_with(begin)), "{words}");
        // The strip has a lane for each kind, and the colors of a chosen iteration are those of the plots.
        assert!(page.number("document.querySelector('.strip').clientHeight") > 100.0);
        let strip = page.place(".strip", 0.0, 0.5);
        page.click((strip.0 + 3.0, strip.1));
        assert!(page.number("document.querySelectorAll('.swatch').length") > 2.0);
        page.looks_right("trace-iteration");
    }

    #[test]
    fn a_comparison_leads_to_both_runs() {
        let sandbox = Sandbox::new();
        recorded(&sandbox, "a", "--context-fmha enable");
        recorded(&sandbox, "b#2", "--context-fmha disable");
        std::fs::create_dir(sandbox.path("pages")).unwrap();
        let screen = sandbox.ok("compare a b#2 --html pages/c.html").stdout;
        let Some((mut page, links)) = open(&sandbox, "pages/c.html", "compare") else { return };
        assert_eq!(links, 4, "report and trace of both sides");
        let flat = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let words = answer(&mut page);
        assert!(flat(&screen).contains(&flat(&words)), "{words}\n{screen}");
        // Bars of decode iterations are as wide as their panel allows, although prefill takes many times as long.
        let widest = "(svg => ['decode', 'prefill'].map(kind => Math.max(...[...svg.querySelectorAll('rect.hit')].filter(r => r.textContent.startsWith(kind)).map(r => r.x.baseVal.value + r.width.baseVal.value)) / svg.viewBox.baseVal.width))\
                      (document.querySelector('#time .wide svg'))";
        let widest: Vec<f64> = serde_json::from_value(page.eval(widest)).unwrap();
        assert!(widest.iter().all(|share| *share > 0.5), "{widest:?}");
    }

    #[test]
    fn traces_of_other_tools_look_right() {
        let sandbox = Sandbox::new();
        for (trace, name) in [(MIXED_NODE, "nsys"), (KINETO, "kineto")] {
            sandbox.ok(&format!("analyze {trace} --html {name}.html"));
            let Some((mut page, links)) = open(&sandbox, &format!("{name}.html"), &format!("analyze-{name}")) else {
                return;
            };
            assert_eq!(links, 0);
            // Findings have a severity and a plain name, and the first is the answer.
            let first = page.eval(
                "(li => [li.querySelector('.severity').textContent, li.querySelector('strong').textContent])(document.querySelector('.findings li'))",
            );
            let [severity, title] = [0, 1].map(|at| first[at].as_str().unwrap().to_owned());
            let words = answer(&mut page);
            assert!(
                words.to_lowercase().starts_with(&format!("{severity}: {}", title.to_lowercase())),
                "{words}: {first}"
            );
        }
    }

    #[test]
    fn traces_of_serving_engines_look_right() {
        let sandbox = Sandbox::new();
        let traces = [
            ("kineto/tracelens/sglang_prefilldecode/sglang_Qwen3-8B_prefilldecode.json.gz", "sglang"),
            ("nsys/nsys-ai/h100_2gpu_1s.sqlite", "two-gpus"),
            ("nsys/h200/gpum.sqlite", "metrics"),
        ];
        for (trace, name) in traces {
            let Some(path) = real(trace) else { return };
            sandbox.ok(&format!("analyze {} --html {name}.html", path.display()));
            if open(&sandbox, &format!("{name}.html"), name).is_none() {
                return;
            }
        }
        let pair = ["before", "after"].map(|side| real(&format!("nsys/nsys-ai/mfu_2gpu_{side}.sqlite")));
        let [Some(a), Some(b)] = pair else { return };
        sandbox.run(&format!("compare {} {} --html pair.html", a.display(), b.display()));
        open(&sandbox, "pair.html", "two-gpus-compared");
    }

    #[test]
    fn compared_traces_look_right() {
        let sandbox = Sandbox::new();
        for (other, name) in [(MIXED_GRAPH, "unlike"), (MIXED_NODE, "alike")] {
            let screen = sandbox.run(&format!("compare {MIXED_NODE} {other} --html {name}.html"));
            let Some((mut page, _)) = open(&sandbox, &format!("{name}.html"), &format!("compare-{name}")) else {
                return;
            };
            let words = answer(&mut page);
            let flat = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(flat(&screen.stdout).contains(&flat(&words)), "{words}\n{}", screen.stdout);
            // Both bars of a category are named, as their color says the category.
            let letters =
                page.eval("[...new Set([...document.querySelectorAll('.amount em')].map(e => e.textContent))]");
            assert_eq!(letters, json!(["A", "B"]));
        }
    }

    #[test]
    fn simulated_runs_and_sweeps_look_right() {
        let sandbox = Sandbox::new();
        let load = "--input-tokens lognormal:600,0.7 --output-tokens geometric:20 --num-requests 200";
        sandbox.ok(&format!("simulate --rate 10 {load} {COST} --slo ttft:p99:50ms --output-dir run"));
        let Some((mut page, _)) = open(&sandbox, "run/report.html", "simulate") else { return };
        let words = answer(&mut page);
        assert!(words.starts_with("Simulated: ") && words.contains("req/s"), "{words}");
        drop(page);
        sandbox.ok(&format!(
            "simulate sweep --vary rate=5,10,20 --vary max-batch-size=1,2,4,8,16,32,64,128,256,512 {load} {COST} --output-csv s.csv --html s.html"
        ));
        let Some((mut page, _)) = open(&sandbox, "s.html", "sweep") else { return };
        let words = answer(&mut page);
        assert!(words.starts_with("Most requests: ") && words.contains("rate "), "{words}");
    }

    #[test]
    fn loads_of_experts_look_right() {
        let sandbox = Sandbox::new();
        sandbox.dataset("d.jsonl", &[(40, 16), (70, 12), (9, 20), (33, 8)]);
        sandbox.ok(
            "bench throughput --model moe-tiny --router-skew zipf:1.5 --dataset d.jsonl --assume-ep 2 --output-dir run",
        );
        if open(&sandbox, "run/report.html", "experts").is_none() {
            return;
        }
        sandbox.ok(
            "bench moe-balance --model moe-tiny --router-skew zipf:1.5 --dataset d.jsonl --repeat 2 --output-dir out",
        );
        let Some((mut page, _)) = open(&sandbox, "out/compare.html", "balance") else { return };
        let words = answer(&mut page);
        assert!(
            ["Significant", "Not significant", "Undecided"].iter().any(|begin| words.starts_with(begin)),
            "{words}"
        );
    }

    /// Programs get every column, also those of which a terminal says nothing because all is zero.
    #[test]
    fn programs_get_columns_of_zeros() {
        let sandbox = Sandbox::new();
        sandbox.dataset("d.jsonl", &[(20, 6), (30, 4)]);
        sandbox.ok("bench throughput --model micro --dataset d.jsonl --warmup 1 --profile 0-3 --output-dir run");
        let document: Value =
            serde_json::from_str(&sandbox.ok("analyze run --report summary,iterations --json").stdout).unwrap();
        let row = |report: usize, table: &str| {
            let tables = document["reports"][report]["tables"].as_array().unwrap();
            tables.iter().find(|one| one["name"] == table).unwrap()["rows"][0].clone()
        };
        let (devices, iteration) = (row(0, "devices"), row(1, "iterations"));
        for name in ["kernels", "copies", "fills", "graphs"] {
            assert_eq!(devices[name], 0, "{devices}");
        }
        assert_eq!([&iteration["kernels"], &iteration["launches"]], [&json!(0), &json!(0)], "{iteration}");
        let csv = sandbox.ok("analyze run --report summary --format csv").stdout;
        assert!(csv.lines().any(|line| line.contains("kernels,copies,fills,graphs")), "{csv}");
        let screen = sandbox.ok("analyze run --report summary").stdout;
        assert!(!screen.contains("kernels") && !screen.contains("graphs"), "{screen}");
    }
}
