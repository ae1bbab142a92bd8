//! Drives a headless Chromium over its debugging pipe: no port, no driver, no network.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

/// One Chromium at a time: several would fight for the machine.
static ONE: Mutex<()> = Mutex::new(());
/// Returns what is wrong with the look of a page, as a list of sentences.
const LOOK: &str = include_str!("look.js");
const PATIENCE: Duration = Duration::from_secs(30);

/// A browser with one page open.
pub(crate) struct Browser {
    child: Child,
    to: File,
    from: Receiver<Value>,
    session: Option<String>,
    next: u64,
    /// What the page said and did that a silent page would not: errors, warnings, requests.
    pub complaints: Vec<String>,
    folder: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

fn chromium() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("STROBE_CHROMIUM") {
        return Some(path.into());
    }
    let names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
    let folders = std::env::var_os("PATH")?;
    let folders: Vec<PathBuf> = std::env::split_paths(&folders).collect();
    names.iter().find_map(|name| folders.iter().map(|folder| folder.join(name)).find(|path| path.is_file()))
}

/// A copy of the descriptor far from the numbers that the browser expects its pipe at.
fn out_of_the_way(fd: &impl AsRawFd) -> OwnedFd {
    use std::os::fd::FromRawFd;
    // SAFETY: the descriptor is open, and the copy is owned by nobody else.
    unsafe {
        let copy = libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 10);
        assert!(copy >= 10, "F_DUPFD: {}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(copy)
    }
}

impl Browser {
    /// Opens a page given as text; `None`, with a word about it, where there is no Chromium.
    pub(crate) fn open(name: &str, html: &str, scheme: &str) -> Option<Self> {
        let Some(program) = chromium() else {
            eprintln!("skipped: no Chromium");
            return None;
        };
        let turn = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("browser-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("page.html");
        std::fs::write(&file, html).unwrap();

        let (commands, to) = std::io::pipe().unwrap();
        let (from, answers) = std::io::pipe().unwrap();
        let (commands, answers) = (out_of_the_way(&commands), out_of_the_way(&answers));
        let mut command = Command::new(program);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]);
        command.args(["--disable-background-networking", "--disable-component-update", "--disable-sync"]);
        command.args(["--disable-extensions", "--hide-scrollbars", "--window-size=1400,1000"]);
        command.arg(format!("--user-data-dir={}", folder.join("profile").display()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let (read, write) = (commands.as_raw_fd(), answers.as_raw_fd());
        // SAFETY: dup2 is all that happens between fork and exec, and it may happen there.
        unsafe {
            command.pre_exec(move || match libc::dup2(read, 3) == 3 && libc::dup2(write, 4) == 4 {
                true => Ok(()),
                false => Err(std::io::Error::last_os_error()),
            });
        }
        let child = command.spawn().expect("Chromium starts");
        drop((commands, answers));

        let (send, receive) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(from).split(0).map_while(Result::ok) {
                let Ok(message) = serde_json::from_slice(&message) else { continue };
                if send.send(message).is_err() {
                    break;
                }
            }
        });
        let to = File::from(OwnedFd::from(to));
        let mut browser =
            Self { child, to, from: receive, session: None, next: 0, complaints: Vec::new(), folder, _turn: turn };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }))["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({ "targetId": target, "flatten": true }));
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser.scheme(scheme);
        browser.size(1400, 1000, 1.0);
        browser.call("Page.navigate", json!({ "url": format!("file://{}", file.display()) }));
        // A promise made before the page is there would never be kept: look until the script has run.
        let begun = std::time::Instant::now();
        let there = "document.readyState === 'complete' && location.href.endsWith('/page.html')";
        while browser.eval(there) != true {
            assert!(
                begun.elapsed() < PATIENCE && browser.complaints.is_empty(),
                "the page does not come up: {:?}",
                browser.complaints
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        // Pages without a timeline are ready as they are.
        let ready = browser.eval("window.strobe ? strobe.ready.catch(String) : true");
        assert_eq!(ready, true, "the page said {:?}", browser.complaints);
        Some(browser)
    }

    /// Sends a command and waits for its answer.
    pub(crate) fn call(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let mut message = json!({ "id": self.next, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = serde_json::to_vec(&message).unwrap();
        bytes.push(0);
        self.to.write_all(&bytes).unwrap();
        loop {
            let answer = self.from.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no answer to {method}"));
            if answer["id"] == self.next {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].clone();
            }
            self.note(&answer);
        }
    }

    fn note(&mut self, event: &Value) {
        let params = &event["params"];
        match event["method"].as_str().unwrap_or_default() {
            "Runtime.exceptionThrown" => {
                let details = &params["exceptionDetails"];
                self.complaints.push(format!("exception: {} {}", details["text"], details["exception"]["description"]));
            }
            "Runtime.consoleAPICalled" => self.complaints.push(format!("console: {}", params["args"])),
            "Log.entryAdded" => self.complaints.push(format!("log: {}", params["entry"]["text"])),
            "Network.requestWillBeSent" => {
                let url = params["request"]["url"].as_str().unwrap_or_default();
                if !url.starts_with("file://") || !url.ends_with("/page.html") {
                    self.complaints.push(format!("request: {url}"));
                }
            }
            _ => {}
        }
    }

    /// The value of an expression in the page; promises are waited for.
    pub(crate) fn eval(&mut self, expression: &str) -> Value {
        let params = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let answer = self.call("Runtime.evaluate", params);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        answer["result"]["value"].clone()
    }

    /// Like [`Browser::eval`] for a number.
    pub(crate) fn number(&mut self, expression: &str) -> f64 {
        self.eval(expression).as_f64().unwrap_or_else(|| panic!("{expression} is no number"))
    }

    /// Like [`Browser::eval`] for text.
    pub(crate) fn text(&mut self, expression: &str) -> String {
        self.eval(expression).as_str().unwrap_or_else(|| panic!("{expression} is no text")).to_owned()
    }

    /// Waits until what was asked for is on the screen.
    pub(crate) fn settle(&mut self) {
        self.eval("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))");
    }

    /// Light or dark, as the system would say.
    pub(crate) fn scheme(&mut self, scheme: &str) {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.call("Emulation.setEmulatedMedia", json!({ "features": features }));
    }

    /// The size of the window and the pixels per CSS pixel.
    pub(crate) fn size(&mut self, width: u32, height: u32, ratio: f64) {
        let params = json!({ "width": width, "height": height, "deviceScaleFactor": ratio, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", params);
    }

    /// A place within the first element that matches, given as shares of its size; it is scrolled into view.
    pub(crate) fn place(&mut self, selector: &str, across: f64, down: f64) -> (f64, f64) {
        let at = self.eval(&format!(
            "(() => {{ const e = document.querySelector({}); e.scrollIntoView({{ block: 'center' }}); \
             const b = e.getBoundingClientRect(); return [b.left + b.width * {across}, b.top + b.height * {down}]; }})()",
            json!(selector)
        ));
        self.settle();
        (at[0].as_f64().unwrap(), at[1].as_f64().unwrap())
    }

    /// A mouse event.
    pub(crate) fn mouse(&mut self, kind: &str, at: (f64, f64), more: Value) {
        let mut params = json!({ "type": kind, "x": at.0, "y": at.1, "button": "left", "clickCount": 1 });
        if kind == "mouseMoved" {
            params["button"] = json!("none");
        }
        for (key, value) in more.as_object().into_iter().flatten() {
            params[key] = value.clone();
        }
        self.call("Input.dispatchMouseEvent", params);
    }

    /// Presses and lets go.
    pub(crate) fn click(&mut self, at: (f64, f64)) {
        self.mouse("mouseMoved", at, json!({}));
        self.mouse("mousePressed", at, json!({ "buttons": 1 }));
        self.mouse("mouseReleased", at, json!({}));
        self.settle();
    }

    /// Presses, moves and lets go; `modifiers` is 8 for shift.
    pub(crate) fn drag(&mut self, from: (f64, f64), to: (f64, f64), modifiers: u32) {
        let more = json!({ "buttons": 1, "button": "left", "modifiers": modifiers });
        self.mouse("mousePressed", from, more.clone());
        for step in 1..=4 {
            let share = f64::from(step) / 4.0;
            let at = (from.0 + (to.0 - from.0) * share, from.1 + (to.1 - from.1) * share);
            self.mouse("mouseMoved", at, more.clone());
        }
        self.mouse("mouseReleased", to, json!({ "modifiers": modifiers }));
        self.settle();
    }

    /// Presses a key by its name, e.g. `ArrowLeft` or `a`.
    pub(crate) fn key(&mut self, key: &str) {
        let code = match key {
            "ArrowLeft" => 37,
            "ArrowUp" => 38,
            "ArrowRight" => 39,
            "ArrowDown" => 40,
            "Enter" => 13,
            "Escape" => 27,
            _ => key.chars().next().map_or(0, |c| c.to_ascii_uppercase() as u32),
        };
        let mut down = json!({ "type": "keyDown", "key": key, "windowsVirtualKeyCode": code });
        if key.chars().count() == 1 {
            down["text"] = json!(key);
        }
        self.call("Input.dispatchKeyEvent", down);
        self.call("Input.dispatchKeyEvent", json!({ "type": "keyUp", "key": key, "windowsVirtualKeyCode": code }));
        self.settle();
    }

    /// Types text into what has the focus.
    pub(crate) fn type_text(&mut self, text: &str) {
        self.call("Input.insertText", json!({ "text": text }));
        self.settle();
    }

    /// Keeps a picture of the window in the folder that `STROBE_SCREENSHOTS` names, if it names one.
    pub(crate) fn picture(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("STROBE_SCREENSHOTS") else { return };
        self.settle();
        let data = self.call("Page.captureScreenshot", json!({ "format": "png" }))["data"].clone();
        std::fs::write(Path::new(&folder).join(format!("{name}.png")), from_base64(data.as_str().unwrap())).unwrap();
    }

    /// Looks at the page as readers do, from a phone to a 4K screen, on light and dark: nothing is cut off, no labels cover each
    /// other, text is large and clear enough, a name has one color everywhere, and the answer comes first.
    pub(crate) fn looks_right(&mut self, name: &str) {
        let mut wrong: Vec<String> = Vec::new();
        for scheme in ["light", "dark"] {
            self.scheme(scheme);
            for width in [400, 800, 1280, 3840] {
                self.size(width, 1000, 1.0);
                self.settle();
                self.picture_of_all(&format!("{name}-{width}-{scheme}"));
                wrong.extend(self.flaws().iter().map(|flaw| format!("{width} px, {scheme}: {flaw}")));
            }
        }
        assert!(wrong.is_empty(), "{name}: {wrong:#?}");
        self.scheme("light");
        self.size(1400, 1000, 1.0);
        self.settle();
    }

    /// What is wrong with the look of the page as it is, in sentences.
    pub(crate) fn flaws(&mut self) -> Vec<String> {
        serde_json::from_value(self.eval(LOOK)).unwrap()
    }

    /// Fails if a link leads to no file, seen from where the page is kept, or leaves the disk. Returns how many lead to files.
    pub(crate) fn links_lead_to_files(&mut self, folder: &Path) -> usize {
        let links = self.eval("[...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))");
        let links: Vec<String> = serde_json::from_value(links).unwrap();
        let (within, away): (Vec<&String>, Vec<&String>) = links.iter().partition(|link| link.starts_with('#'));
        for link in within {
            assert_eq!(self.eval(&format!("document.querySelector({}) !== null", json!(link))), true, "{link}");
        }
        for link in &away {
            assert!(!link.contains(':') && !link.starts_with('/'), "{link} is not relative");
            let path = self.text(&format!("decodeURIComponent({})", json!(link)));
            assert!(folder.join(&path).is_file(), "{link} leads to no file");
        }
        away.len()
    }

    /// Keeps a picture of the whole page, as [`Browser::picture`] does.
    pub(crate) fn picture_of_all(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("STROBE_SCREENSHOTS") else { return };
        let size = self.call("Page.getLayoutMetrics", json!({}))["cssContentSize"].clone();
        let clip = json!({ "x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1 });
        let params = json!({ "format": "png", "captureBeyondViewport": true, "clip": clip });
        let data = self.call("Page.captureScreenshot", params)["data"].clone();
        std::fs::write(Path::new(&folder).join(format!("{name}.png")), from_base64(data.as_str().unwrap())).unwrap();
    }

    /// Fails if the page complained about anything or asked for anything.
    pub(crate) fn silent(&mut self) {
        self.settle();
        assert!(self.complaints.is_empty(), "{:#?}", self.complaints);
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The browser also goes when its pipe closes; waiting keeps its folder from being written again.
        let _ = self.to.write_all(b"{\"id\":0,\"method\":\"Browser.close\"}\0");
        for _ in 0..100 {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn from_base64(text: &str) -> Vec<u8> {
    let value = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let digits: Vec<u8> = text.bytes().filter(|&c| c != b'=').map(value).collect();
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    for group in digits.chunks(4) {
        let bits = group.iter().fold(0u32, |bits, &digit| bits << 6 | u32::from(digit)) << (6 * (4 - group.len()));
        bytes.extend(&bits.to_be_bytes()[1..group.len()]);
    }
    bytes
}
