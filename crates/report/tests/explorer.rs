//! The explorer page in a real browser: it comes up in silence, zooms, searches, and shows the numbers it was given.

#[cfg(unix)]
#[allow(dead_code)] // every test uses its own part of the browser
mod browser;
#[cfg(unix)]
mod sample;

#[cfg(unix)]
mod tests {
    use serde_json::json;
    use strobe_report::explorer::CategoryBar;
    use strobe_report::human;

    use super::browser::Browser;
    use super::sample;

    const VIEW: &str = "strobe.view()";

    fn range(page: &mut Browser) -> (f64, f64) {
        let view = page.eval(VIEW);
        (view["t0"].as_f64().unwrap(), view["t1"].as_f64().unwrap())
    }

    #[test]
    fn it_shows_what_it_was_given() {
        let data = sample::one_trace();
        let Some(mut page) = Browser::open("given", &data.finish(), "light") else { return };
        page.picture("top");
        assert_eq!(page.number("document.querySelectorAll('.card').length"), data.cards.len() as f64);
        assert_eq!(page.text("document.querySelector('.card .value').textContent"), "61.4 %");
        assert_eq!(page.number("document.querySelectorAll('.findings li').length"), data.findings.len() as f64);
        let kernels = page.text("document.querySelector('#kernels .shown').textContent");
        assert_eq!(kernels, format!("1 to 25 of {} rows", sample::KERNELS));
        let cells =
            "[...document.querySelectorAll('#kernels tbody tr:first-child td')].map(c => c.textContent).join('|')";
        assert_eq!(page.text(cells), sample::kernel_row(0).join("|"));
        let total = "document.querySelector('#kernels tfoot td').textContent";
        assert_eq!(page.text(total), "all kernels");
        page.eval("document.querySelector('#kernels').scrollIntoView()");
        page.picture("kernels");
        page.size(1300, 1000, 2.0);
        page.settle();
        let sharp = "new Promise(done => { const canvas = document.querySelector('canvas.tracks'); \
                     const look = () => canvas.width === 2 * canvas.clientWidth ? done(true) : setTimeout(look, 20); look(); })";
        assert_eq!(page.eval(sharp), true, "drawn in the screen's own pixels");
        page.silent();
    }

    #[test]
    fn it_looks_right_at_any_size() {
        let Some(mut page) = Browser::open("look", &sample::one_trace().finish(), "light") else { return };
        page.looks_right("explorer");
        let strip = page.place(".strip", 0.0, 0.5);
        page.click((strip.0 + 3.0, strip.1));
        page.eval("document.querySelector('canvas.tracks').focus()");
        page.key(".");
        page.looks_right("explorer-chosen");
        // Thirteen categories and more: the rest is folded, and can be opened.
        let mut many = sample::comparison();
        let bars = many.categories.as_mut().unwrap();
        let row = bars.rows[0].clone();
        bars.rows.extend((0..20).map(|i| CategoryBar { name: format!("other {i}"), ..row.clone() }));
        drop(page);
        let Some(mut page) = Browser::open("many", &many.finish(), "light") else { return };
        page.looks_right("explorer-many");
        assert_eq!(page.text("document.querySelector('.more summary').textContent"), "13 more");
        page.eval("document.querySelector('.more').open = true");
        assert_eq!(page.eval("[...document.querySelectorAll('.category')].every(e => e.checkVisibility())"), true);
        page.silent();
    }

    /// A check that cannot fail is none: each flaw is planted, found, and gone again.
    #[test]
    fn planted_flaws_are_found() {
        let Some(mut page) = Browser::open("flaws", &sample::one_trace().finish(), "light") else { return };
        page.size(400, 1000, 1.0);
        page.settle();
        assert_eq!(page.flaws(), Vec::<String>::new());
        let flaws = [
            ("document.querySelector('.card').style.width = '500px'", "the page scrolls sideways"),
            (
                "Object.assign(document.querySelector('.card .note').style, { width: '20px', overflow: 'hidden', whiteSpace: 'nowrap' })",
                "cut off",
            ),
            (
                "document.querySelector('.narrow .title').textContent += ' and much more text than fits into a plot of this width'",
                "outside its plot",
            ),
            ("document.querySelector('.narrow .title').style.fontSize = '6px'", "too small"),
            (
                "(t => t.setAttribute('y', t.previousElementSibling.getAttribute('y')))(document.querySelectorAll('.narrow text')[1])",
                "labels cover each other",
            ),
            ("document.querySelector('.subtitle').style.color = '#aaa'", "hard to read"),
            ("document.querySelector('.category i').style.background = 'var(--c9)'", "several colors"),
            ("document.documentElement.style.setProperty('--c0', 'var(--c1)')", "share"),
            ("document.documentElement.style.setProperty('--c0', '#eeeeee')", "hard to see"),
            (
                "(c => { for (let i = 0; i < 9; i++) c.after(c.cloneNode(true)); })(document.querySelector('.category'))",
                "bars are not folded",
            ),
            ("document.querySelector('main').prepend('first')", "the first line is not the answer"),
        ];
        let whole = page.text("document.querySelector('main').innerHTML");
        for (plant, said) in flaws {
            page.eval(&format!("({plant}, 1)"));
            page.settle();
            let found = page.flaws();
            assert!(found.iter().any(|flaw| flaw.contains(said)), "{plant}: {found:#?}");
            page.eval(&format!(
                "(document.querySelector('main').innerHTML = {}, document.documentElement.removeAttribute('style'), 1)",
                json!(whole)
            ));
        }
    }

    #[test]
    fn mouse_and_keys_move_the_timeline() {
        let data = sample::one_trace();
        let Some(mut page) = Browser::open("keys", &data.finish(), "light") else { return };
        let all = range(&mut page);
        let middle = page.place("canvas.tracks", 0.5, 0.5);
        std::thread::sleep(std::time::Duration::from_millis(300)); // what scrolls the page does not zoom
        let wheel = |page: &mut Browser, down: f64| {
            page.mouse("mouseWheel", middle, json!({ "deltaX": 0, "deltaY": down }));
            page.settle();
        };
        wheel(&mut page, -600.0);
        let near = range(&mut page);
        assert!(near.0 > all.0 && near.1 < all.1, "the wheel zooms in: {all:?} {near:?}");
        let point = |range: (f64, f64)| (range.0 + range.1) / 2.0;
        assert!((point(near) - point(all)).abs() < (near.1 - near.0) * 0.02, "at the pointer");

        page.drag(middle, (middle.0 - 200.0, middle.1), 0);
        let moved = range(&mut page);
        assert!(moved.0 > near.0, "dragging to the left goes on in time");
        assert!(((moved.1 - moved.0) - (near.1 - near.0)).abs() < 1.0, "and keeps the zoom");

        page.eval("document.querySelector('canvas.tracks').focus()");
        page.key("a");
        let back = range(&mut page);
        assert!(back.0 < moved.0);
        page.key("ArrowRight");
        assert!(range(&mut page).0 > back.0);
        page.key("w");
        let closer = range(&mut page);
        assert!(closer.1 - closer.0 < near.1 - near.0);
        page.key("0");
        assert_eq!(range(&mut page), all);
        page.key("+");
        assert!(range(&mut page).0 > all.0);
        page.key("0");

        page.drag((middle.0 - 100.0, middle.1), (middle.0 + 100.0, middle.1), 8);
        assert!(!page.eval("strobe.measured()").is_null());
        assert!(page.text("document.querySelector('#details').textContent").contains("busy share of range"));
        assert_eq!(range(&mut page), all, "measuring does not move");
        let ends = [0.001, 0.999].map(|share| page.place("canvas.tracks", share, 0.5));
        page.drag(ends[0], ends[1], 8);
        let row =
            page.text("[...document.querySelectorAll('table.measured tbody td')].map(c => c.textContent).join('|')");
        let (ops, sum, busy) = sample::device_time(&data);
        let [ops, sum, busy] = [human::count(ops), human::ns(sum as f64), human::ns(busy as f64)];
        assert!(row.contains(&format!("|{ops}|{sum}|{busy}|")), "{row}, not {ops} ops, {sum}, {busy}");
        page.picture("measured");
        page.key("Escape");
        assert!(page.eval("strobe.measured()").is_null());
        page.key("?");
        assert_eq!(page.eval("document.querySelector('#help').open"), true);
        page.picture("help");
        page.silent();
    }

    #[test]
    fn an_event_shows_its_launch() {
        let Some(mut page) = Browser::open("launch", &sample::one_trace().finish(), "light") else { return };
        page.eval("document.querySelector('canvas.tracks').focus()");
        page.key("]");
        page.key(".");
        let chosen = page.eval("strobe.selected()");
        assert!(!chosen["name"].as_str().unwrap().is_empty());
        assert_eq!(chosen["linked"], 1);
        let details = page.text("document.querySelector('#details').textContent");
        assert!(details.contains("launched by") && details.contains("cudaLaunchKernel"), "{details}");
        page.key("f");
        for _ in 0..5 {
            page.key("-");
        }
        page.place("canvas.tracks", 0.5, 0.5);
        page.picture("launch");
        page.eval("[...document.querySelectorAll('#details button.find')].at(-1).click()");
        assert_eq!(page.eval("strobe.selected().name"), "cudaLaunchKernel");
        assert_eq!(page.eval("strobe.selected().linked"), 1);

        let before = page.number("document.querySelector('.gutter').clientHeight");
        page.eval("document.querySelector('.track').click()");
        assert!(page.number("document.querySelector('.gutter').clientHeight") < before, "a track folds");
        assert_eq!(page.eval("document.querySelector('.track').getAttribute('aria-expanded')"), "false");
        page.silent();
    }

    #[test]
    fn search_counts_and_steps() {
        let data = sample::one_trace();
        let (events, ns) = sample::ops_named(&data, "nvjet_sm90_0");
        let Some(mut page) = Browser::open("search", &data.finish(), "light") else { return };
        page.key("/");
        assert_eq!(page.eval("document.activeElement.id"), "search");
        page.type_text("NVJET_sm90_0");
        let matches = page.eval("strobe.matches()");
        assert_eq!((matches["count"].as_u64(), matches["time"].as_f64()), (Some(events), Some(ns as f64)));
        let shown = page.text("document.querySelector('#found').textContent");
        assert!(shown.starts_with(&format!("{} matches", human::count(events))), "{shown}");
        page.picture("search");
        page.key("Enter");
        let first = page.eval("strobe.selected()");
        page.key("Enter");
        let second = page.eval("strobe.selected()");
        assert!(second["index"].as_u64() > first["index"].as_u64());

        let mut find = |text: &str| {
            page.eval(&format!("(b => {{ b.value = {}; b.dispatchEvent(new Event('input')); }})(search)", json!(text)));
            page.number("strobe.matches().count")
        };
        assert_eq!(find("/nvjet_sm90_[0]$/"), events as f64);
        assert_eq!(find("=nvjet_sm90"), 0.0);
        assert!(find("cat:gemm") >= events as f64);
        assert_eq!(find("/(/"), 0.0);
        assert_eq!(page.text("document.querySelector('#found').textContent"), "not a regular expression");
        page.eval("document.querySelector('#kernels button.find').click()");
        assert_eq!(page.text("strobe.matches().query"), format!("={}", sample::kernel_row(0)[0]));
        assert_eq!(page.number("strobe.matches().count").to_string(), sample::kernel_row(0)[1].replace(',', ""));
        page.eval("document.querySelector('.category').click()");
        assert_eq!(page.text("strobe.matches().query"), "cat:gemm");
        page.silent();
    }

    #[test]
    fn an_iteration_shows_its_budget() {
        let data = sample::one_trace();
        let Some(mut page) = Browser::open("iteration", &data.finish(), "light") else { return };
        let each =
            48.0_f64.min(page.number("document.querySelector('.strip').clientWidth") / sample::ITERATIONS as f64);
        let strip = page.place(".strip", 0.0, 0.5);
        page.click((strip.0 + each * 3.5, strip.1));
        assert_eq!(page.eval("strobe.iteration()"), json!([3]));
        let cell = &data.sides[0].iterations.cells[3];
        let rows = page.number("document.querySelectorAll('table.budget tbody tr').length");
        assert_eq!(rows, cell.parts.iter().flatten().filter(|&&ns| ns > 0).count() as f64);
        let wall = page.text("document.querySelector('table.budget tfoot td.n').textContent");
        assert_eq!(wall, human::ns((cell.end - cell.start) as f64));
        let gemm = page.text("document.querySelector('table.budget tbody td.n').textContent");
        assert_eq!(gemm, human::ns(cell.parts[0].unwrap() as f64));
        let (from, to) = range(&mut page);
        let origin = data.sides[0].iterations.cells[0].start;
        let wall = (cell.end - cell.start) as f64;
        assert!((from - ((cell.start - origin) as f64 - wall * 0.04)).abs() < 1.0, "{from}");
        assert!((to - ((cell.end - origin) as f64 + wall * 0.04)).abs() < 1.0, "{to}");
        page.picture("iteration");
        page.eval("document.querySelector('.strip').focus()");
        page.key("ArrowRight");
        assert_eq!(page.eval("strobe.iteration()"), json!([4]));
        page.place("canvas.tracks", 0.5, 0.5);
        page.picture("iteration-timeline");
        page.silent();
    }

    #[test]
    fn tables_sort_filter_and_turn_pages() {
        let Some(mut page) = Browser::open("tables", &sample::one_trace().finish(), "light") else { return };
        let column = "[...document.querySelectorAll('#kernels tbody tr')].map(r => Number(r.cells[1].textContent.replace(/,/g, '')))";
        let sorted = |page: &mut Browser| -> Vec<f64> { serde_json::from_value(page.eval(column)).unwrap() };
        page.eval("document.querySelectorAll('#kernels th button')[1].click()");
        let down = sorted(&mut page);
        assert!(down.is_sorted_by(|a, b| a >= b) && down[0] > down[24], "{down:?}");
        page.eval("document.querySelectorAll('#kernels th button')[1].click()");
        assert!(sorted(&mut page).is_sorted());
        assert_eq!(page.eval("document.querySelectorAll('#kernels th')[1].getAttribute('aria-sort')"), "ascending");
        page.eval("document.querySelector('#kernels .pager button[title=\"Last page\"]').click()");
        let shown = page.text("document.querySelector('#kernels .shown').textContent");
        assert!(shown.contains(&format!("to {0} of {0} rows", sample::KERNELS)), "{shown}");
        page.eval("(b => { b.value = 'flash'; b.dispatchEvent(new Event('input')); })(document.querySelector('#kernels input'))");
        let named =
            "[...document.querySelectorAll('#kernels tbody tr')].every(r => r.cells[0].textContent.includes('flash'))";
        assert_eq!(page.eval(named), true);
        assert!(page.number("document.querySelectorAll('#kernels tbody tr').length") > 0.0);

        page.eval("document.querySelector('#tab-0').focus()");
        page.key("ArrowRight");
        assert_eq!(page.eval("document.querySelector('#tab-1').getAttribute('aria-selected')"), "true");
        assert!(
            page.text("document.querySelector('#report-panel').textContent")
                .contains("Does not apply: no memory copies")
        );
        page.place("#reports", 0.5, 0.5);
        page.picture("reports");
        page.silent();
    }

    #[test]
    fn light_and_dark_both_work() {
        let Some(mut page) = Browser::open("dark", &sample::one_trace().finish(), "dark") else { return };
        let paper = "getComputedStyle(document.querySelector('section')).backgroundColor";
        assert_eq!(page.text(paper), "rgb(25, 34, 44)");
        page.picture("dark-top");
        page.key("]");
        page.place("canvas.tracks", 0.5, 0.5);
        page.picture("dark-timeline");
        let corner = "(c => { c.drawImage(document.querySelector('canvas.tracks'), 0, 0); \
                      return [...c.getImageData(1, 1, 1, 1).data].join(); })(new OffscreenCanvas(2, 2).getContext('2d'))";
        assert_eq!(page.text(corner), "25,34,44,255");
        page.eval("document.querySelector('#theme').click()");
        page.settle();
        assert_eq!(page.text(paper), "rgb(255, 255, 255)");
        assert_eq!(page.text(corner), "255,255,255,255");
        let chart = "getComputedStyle(document.querySelector('.strobe-chart')).getPropertyValue('--paper').trim()";
        assert_eq!(page.text(chart), "#ffffff");
        page.silent();
    }

    #[test]
    fn two_sides_are_linked() {
        let data = sample::comparison();
        let Some(mut page) = Browser::open("compare", &data.finish(), "light") else { return };
        page.picture("compare-top");
        assert_eq!(page.number("document.querySelectorAll('canvas.tracks').length"), 2.0);
        // Bars of both sides are on the same scales: the slower side's are taller.
        let tall = "[...document.querySelectorAll('.strip')].map(strip => { \
                    const pixels = strip.getContext('2d').getImageData(Math.round(strip.width / 40 * 3.5), 0, 1, strip.height).data; \
                    const at = y => pixels.slice(4 * y, 4 * y + 3).join(), floor = strip.height - 4; \
                    let y = floor; while (y > 0 && at(y) === at(floor)) y--; return floor - y; })";
        let tall: Vec<f64> = serde_json::from_value(page.eval(tall)).unwrap();
        assert!(tall[1] > tall[0] && tall[0] > 5.0, "{tall:?}");
        let each = page.number("document.querySelector('.strip').clientWidth") / sample::ITERATIONS as f64;
        let strip = page.place(".strip", 0.0, 0.5);
        page.click((strip.0 + each * 2.5, strip.1));
        assert_eq!(page.eval("strobe.iteration()"), json!([2, data.pairs[2].1]));
        let heads = "[...document.querySelectorAll('table.budget th')].map(h => h.textContent).join('|')";
        assert_eq!(page.text(heads), "part|before|share of wall|after|share of wall|difference");
        let walls = [&data.sides[0].iterations.cells[2], &data.sides[1].iterations.cells[data.pairs[2].1 as usize]];
        let walls = walls.map(|cell| (cell.end - cell.start) as f64);
        let difference = page.text("document.querySelector('table.budget tfoot td:last-child').textContent");
        let sign = if walls[1] > walls[0] { "+" } else { "" };
        assert_eq!(difference, format!("{sign}{}", human::ns(walls[1] - walls[0])));
        let (from, _) = range(&mut page);
        assert!(from < 0.0, "both iterations begin at 0");
        page.picture("compare-budget");
        page.place("#timeline", 0.5, 0.5);
        page.picture("compare-timeline");
        page.silent();
    }

    #[test]
    fn hostile_names_are_only_text() {
        let data = sample::hostile();
        let Some(mut page) = Browser::open("hostile", &data.finish(), "light") else { return };
        page.key("]");
        page.key(".");
        page.key("/");
        page.type_text("script");
        let at = page.place("canvas.tracks", 0.5, 0.3);
        page.mouse("mouseMoved", at, json!({}));
        page.eval("document.querySelectorAll('[role=tab]').forEach(tab => tab.click())");
        assert_eq!(page.eval("window.hacked === undefined"), true);
        assert_eq!(page.number("document.querySelectorAll('img, iframe, object, [onerror], [onload]').length"), 0.0);
        assert_eq!(page.text("document.title"), sample::HOSTILE);
        assert!(page.number("strobe.matches().count") > 0.0);
        page.silent();
    }

    #[test]
    fn an_empty_page_comes_up() {
        let Some(mut page) = Browser::open("empty", &strobe_report::explorer::Explorer::default().finish(), "light")
        else {
            return;
        };
        page.key("/");
        page.key("?");
        page.silent();
    }

    #[test]
    fn a_million_events_stay_fluid() {
        let data = sample::million();
        let began = std::time::Instant::now();
        let html = data.finish();
        let made = began.elapsed();
        assert!(html.len() < 15 << 20, "{} bytes", html.len());
        let Some(mut page) = Browser::open("million", &html, "light") else { return };
        let opened = page.number("performance.now()");
        let best = "Math.min(...Array.from({ length: 10 }, () => strobe.redraw()))";
        let all = page.number(best);
        page.place("#timeline", 0.5, 0.5);
        page.picture("million");
        let middle = page.place("canvas.tracks", 0.5, 0.5);
        std::thread::sleep(std::time::Duration::from_millis(300));
        let mut zoomed = Vec::new();
        for _ in 0..6 {
            page.mouse("mouseWheel", middle, json!({ "deltaX": 0, "deltaY": -700 }));
            page.settle();
            zoomed.push(page.number(best));
        }
        page.picture("million-zoomed");
        page.key("0");
        let search = page.number(
            "(() => { const t = performance.now(); search.value = 'kernel_1'; search.dispatchEvent(new Event('input')); \
             return performance.now() - t; })()",
        );
        let marked = page.number(best);
        assert!(page.number("strobe.matches().count") > 10_000.0);
        page.picture("million-search");
        println!(
            "1 M events: made in {made:.2?}, {:.1} MB, open after {opened:.0} ms; redraw {all:.1} ms for all, {zoomed:.1?} \
             while zooming, {marked:.1} ms with matches; search {search:.1} ms",
            html.len() as f64 / 1e6
        );
        page.silent();
    }
}
