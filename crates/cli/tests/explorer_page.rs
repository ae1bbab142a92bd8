//! The pages of `strobe analyze` and `strobe compare` in a real browser: they come up in silence, move, and show the
//! numbers that the terminal shows.

#[cfg(unix)]
#[path = "../../report/tests/browser/mod.rs"]
#[allow(dead_code)] // every test uses its own part of the browser
mod browser;
mod common;

#[cfg(unix)]
mod tests {
    use serde_json::{Value, json};

    use super::browser::Browser;
    use super::common::Sandbox;
    use super::common::traces::{KINETO, MIXED_GRAPH, MIXED_NODE};

    /// The page of a trace, and what `--json` says about it.
    fn page_of(sandbox: &Sandbox, trace: &str, name: &str) -> (Option<Browser>, Value) {
        let words = format!("analyze {trace} --report summary,kern-sum,iterations,categories --json --html page.html");
        let document = serde_json::from_str(&sandbox.ok(&words).stdout).unwrap();
        (Browser::open(name, &sandbox.read("page.html"), "light"), document)
    }

    fn rows(document: &Value, report: usize, table: usize) -> &Vec<Value> {
        document["reports"][report]["tables"][table]["rows"].as_array().unwrap()
    }

    fn check_trace(trace: &str, name: &str) {
        let sandbox = Sandbox::new();
        let (Some(mut page), document) = page_of(&sandbox, trace, name) else { return };
        page.picture(&format!("page-{name}"));
        let kernels = rows(&document, 1, 0);
        let instances: u64 = kernels.iter().map(|row| row["Instances"].as_u64().unwrap()).sum();

        let cards = page.text("[...document.querySelectorAll('.card')].map(c => c.textContent).join('|')");
        let counted = instances.to_string();
        assert!(cards.replace(',', "").contains(&counted), "{cards} has not {counted} kernels");

        let shown = page.text("document.querySelector('#kernels .shown').textContent");
        assert!(shown.ends_with(&format!("{} rows", kernels.len())), "{shown}");
        let screen =
            sandbox.ok_with(&[("COLUMNS", "400")], &format!("analyze {trace} --report kern-sum --top 0")).stdout;
        let first = "[...document.querySelectorAll('#kernels tbody tr:first-child td')].map(c => c.textContent)";
        let cells: Vec<String> = serde_json::from_value(page.eval(first)).unwrap();
        let line = screen.lines().find(|line| line.contains(" % ")).unwrap();
        for cell in &cells[..cells.len() - 1] {
            assert!(line.contains(cell.as_str()), "{cell} of the page is not in: {line}");
        }
        assert!(cells.last().unwrap().contains(kernels[0]["Name"].as_str().unwrap()));

        // As many events of that name in the timeline as the table counts.
        page.eval("document.querySelector('#kernels button.find').click()");
        assert_eq!(page.number("strobe.matches().count"), kernels[0]["Instances"].as_f64().unwrap());
        assert_eq!(page.number("strobe.matches().time"), kernels[0]["Total Time (ns)"].as_f64().unwrap());

        let all = page.eval("strobe.view()");
        page.eval("document.querySelector('canvas.tracks').focus()");
        page.key("w");
        let near = page.eval("strobe.view()");
        assert!(
            near["t1"].as_f64().unwrap() - near["t0"].as_f64().unwrap()
                < all["t1"].as_f64().unwrap() - all["t0"].as_f64().unwrap()
        );
        page.key("0");

        let strip = page.place(".strip", 0.0, 0.5);
        page.click((strip.0 + 3.0, strip.1));
        assert_eq!(page.eval("strobe.iteration()"), json!([0]));
        assert!(page.number("document.querySelectorAll('table.budget tbody tr').length") > 1.0);
        page.picture(&format!("page-{name}-iteration"));
        page.place("#kernels", 0.5, 0.2);
        page.picture(&format!("page-{name}-kernels"));
        page.place("#reports", 0.5, 0.2);
        page.picture(&format!("page-{name}-reports"));
        page.silent();
    }

    #[test]
    fn an_nsys_export_is_explored() {
        check_trace(MIXED_NODE, "nsys");
    }

    #[test]
    fn a_pytorch_trace_is_explored() {
        check_trace(KINETO, "kineto");
    }

    #[test]
    fn two_traces_are_seen_side_by_side() {
        let sandbox = Sandbox::new();
        let screen = sandbox.run(&format!("compare {MIXED_NODE} {MIXED_GRAPH} --html page.html")).stdout;
        let Some(mut page) = Browser::open("compared", &sandbox.read("page.html"), "light") else { return };
        page.picture("page-compare");
        assert_eq!(page.number("document.querySelectorAll('canvas.tracks').length"), 2.0);
        let text = page.text("document.body.innerText");
        assert!(screen.starts_with("not comparable") && text.to_lowercase().contains("not comparable"), "{text}");
        assert!(text.contains("mixed_node.sqlite") && text.contains("mixed_graph.sqlite"));
        let strip = page.place(".strip", 0.0, 0.5);
        page.click((strip.0 + 3.0, strip.1));
        assert!(page.eval("strobe.iteration()").as_array().is_some_and(|sides| !sides.is_empty()));
        page.place("canvas.tracks", 0.5, 0.5);
        page.picture("page-compare-iteration");
        page.silent();
    }
}
