// Puts the page together and keeps what all parts share: the visible range, the search, what is chosen.
class App {
  constructor(data) {
    this.data = data;
    this.sides = data.sides;
    this.views = [];
    this.strips = [];
    this.chosen = data.sides.map(() => null);
    this.query = null;
    this.found = { count: 0, time: 0 };
    this.selected = null;
    this.linked = [];
    this.launches = false;
    this.measured = null;
    this.pointer = null;
    this.scrolledAt = -Infinity;
    this.frameMs = 0;
    this.tipBox = el('div', { class: 'tip', role: 'tooltip', hidden: true });
    document.body.append(this.tipBox);
    this.build();
    this.range();
    this.fit();
    this.keys();
    const recolor = () => { this.views.forEach(view => view.recolor()); this.draw(); };
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', recolor);
    document.getElementById('theme').addEventListener('click', () => {
      const root = document.documentElement;
      const dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
      root.dataset.theme = dark ? 'light' : 'dark';
      recolor();
    });
    addEventListener('resize', () => this.draw());
    addEventListener('scroll', () => { this.scrolledAt = performance.now(); }, { passive: true });
  }

  build() {
    const fill = (id, ...children) => {
      const section = document.getElementById(id);
      if (!section) return;
      section.querySelector('.loading').remove();
      section.append(...children);
    };
    if (document.getElementById('iterations')) {
      const sides = this.sides.filter(side => side.iterations.count);
      this.strips = sides.map(side => new Strip(side, this));
      this.budget = el('div', { id: 'budget', role: 'status' }, ...budget(this, []));
      const notes = [...new Set(sides.map(side => side.iterations.note).filter(Boolean))];
      fill('iterations', ...notes.map(note => el('p', { class: 'note' }, ...withCode(note))), ...this.strips.map(strip => strip.element), this.budget);
    }
    if (document.getElementById('timeline')) {
      this.views = this.sides.filter(side => side.events).map(side => new Timeline(side, this));
      fill('timeline', this.toolbar(), ...this.views.map(view => view.element), this.details = el('div', { id: 'details', role: 'status' }));
      this.legend(fill);
    }
    const find = this.views.length ? names => { this.search(names); document.getElementById('timeline').scrollIntoView({ block: 'start' }); } : null;
    if (this.data.kernels) fill('kernels', new TableView(this.data.kernels, find).element);
    if (this.data.reports.length) this.reports(fill, find);
    for (const bar of document.querySelectorAll('.category')) {
      bar.addEventListener('click', () => { if (find) { this.search('cat:' + bar.dataset.find); document.getElementById('timeline').scrollIntoView({ block: 'start' }); } });
    }
    this.help();
  }

  legend(fill) {
    const seen = new Map();
    for (const side of this.sides) for (const category of side.categories) seen.set(category.name, category.color);
    const keys = [...seen].map(([name, color]) => el('button', { type: 'button', class: 'key', title: `Show only ${name}`, onclick: () => this.search('cat:' + name) },
      el('i', { style: `background:var(${color})` }), name));
    document.getElementById('details').before(el('div', { class: 'legend' }, ...keys));
  }

  toolbar() {
    const button = (text, title, act) => el('button', { type: 'button', title, 'aria-label': title, onclick: act }, text);
    this.box = el('input', {
      type: 'search', id: 'search', placeholder: 'Search events  /', 'aria-label': 'Search events by name',
      title: 'Part of a name; /regular expression/; =exact name; cat:category',
      oninput: () => this.search(this.box.value, true),
      onkeydown: event => {
        if (event.key === 'Enter') this.step(event.shiftKey ? -1 : 1);
        else if (event.key === 'Escape') { this.search(''); this.box.blur(); this.views[0]?.canvas.focus(); }
        else return;
        event.preventDefault();
      },
    });
    this.foundText = el('span', { id: 'found', role: 'status' });
    this.rangeText = el('span', { id: 'range' });
    return el('div', { class: 'tools' }, this.box, button('‹', 'Previous match (N)', () => this.step(-1)), button('›', 'Next match (n)', () => this.step(1)),
      this.foundText, el('span', { class: 'space' }), this.rangeText,
      button('−', 'Zoom out (-)', () => this.zoom(2)), button('+', 'Zoom in (+)', () => this.zoom(0.5)), button('Fit', 'Show all (0)', () => this.fit()));
  }

  reports(fill, find) {
    const tabs = el('div', { class: 'tabs', role: 'tablist', 'aria-label': 'Reports' });
    const panel = el('div', { class: 'panel', role: 'tabpanel', id: 'report-panel', tabindex: 0 });
    const made = new Map();
    const open = index => {
      const report = this.data.reports[index];
      [...tabs.children].forEach((tab, at) => { tab.setAttribute('aria-selected', String(at === index)); tab.tabIndex = at === index ? 0 : -1; });
      if (!made.has(index)) {
        made.set(index, [el('h3', {}, report.title), report.absent ? el('p', { class: 'absent' }, 'Does not apply: ' + report.absent) : null,
          ...report.tables.map(table => new TableView(table, find).element),
          report.notes.length ? el('ul', { class: 'notes' }, ...report.notes.map(note => el('li', {}, ...withCode(note)))) : null].filter(Boolean));
      }
      panel.setAttribute('aria-labelledby', 'tab-' + index);
      panel.replaceChildren(...made.get(index));
    };
    this.data.reports.forEach((report, index) => tabs.append(el('button', {
      type: 'button', role: 'tab', id: 'tab-' + index, 'aria-controls': 'report-panel', class: report.absent ? 'absent' : null,
      title: report.title, onclick: () => open(index),
    }, report.name)));
    tabs.addEventListener('keydown', event => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      const now = [...tabs.children].indexOf(document.activeElement), to = (now + by + tabs.children.length) % tabs.children.length;
      open(to);
      tabs.children[to].focus();
      event.preventDefault();
    });
    fill('reports', tabs, panel);
    open(0);
  }

  help() {
    const keys = [
      ['Wheel', 'zoom at the pointer'], ['Drag', 'pan; up and down scrolls the tracks'], ['Shift + drag', 'measure a range'],
      ['Click', 'choose an event: its launch is drawn'], ['Double click', 'zoom to an event'], ['A D, ← →', 'pan'], ['W S, ↑ ↓, + −', 'zoom'],
      ['0', 'show all'], ['F', 'zoom to the chosen event'], [', .', 'previous, next event of the lane'], ['/', 'search'], ['N, Shift + N', 'next, previous match'],
      ['[ ]', 'previous, next iteration'], ['Esc', 'drop search, measure and choice'], ['?', 'this list'],
    ];
    const dialog = el('dialog', { id: 'help', 'aria-label': 'Keys and mouse' }, el('h2', {}, 'Keys and mouse'),
      el('table', {}, el('tbody', {}, ...keys.map(([key, does]) => el('tr', {}, el('td', {}, el('kbd', {}, key)), el('td', {}, does))))),
      el('p', { class: 'note' }, 'Arrow keys act on the timeline or the iteration strip once it is focused. Search takes part of a name, /regular expression/, =exact name or cat:category.'),
      el('form', { method: 'dialog' }, el('button', {}, 'Close')));
    document.body.append(dialog);
    document.getElementById('help-open').addEventListener('click', () => dialog.showModal());
    this.openHelp = () => dialog.showModal();
  }

  keys() {
    addEventListener('keydown', event => {
      const target = event.target, onCanvas = target.classList?.contains('tracks');
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) || document.querySelector('dialog[open]')) return;
      if (!this.views.length && event.key !== '?') return;
      const general = {
        '/': () => { this.box.focus(); this.box.select(); }, '?': () => this.openHelp(), a: () => this.pan(-0.2), d: () => this.pan(0.2), w: () => this.zoom(0.7, this.pointer), s: () => this.zoom(1 / 0.7, this.pointer),
        '+': () => this.zoom(0.5, this.pointer), '=': () => this.zoom(0.5, this.pointer), '-': () => this.zoom(2, this.pointer), 0: () => this.fit(), f: () => this.selected && this.show(this.selected),
        n: () => this.step(1), N: () => this.step(-1), '[': () => this.stepIteration(-1), ']': () => this.stepIteration(1), ',': () => this.neighbour(-1), '.': () => this.neighbour(1),
        Escape: () => { this.search(''); this.measure(null, true); this.select(null); },
      };
      const focused = {
        ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), ArrowUp: () => this.zoom(0.7), ArrowDown: () => this.zoom(1 / 0.7),
        PageDown: () => target.parentNode.scrollBy(0, 200), PageUp: () => target.parentNode.scrollBy(0, -200), Home: () => this.fit(),
      };
      const act = general[event.key] || (onCanvas && focused[event.key]);
      if (!act) return;
      event.preventDefault();
      act();
    });
  }

  // The span of all sides, as they are aligned.
  range() {
    const views = this.views.length ? this.views : [{ side: this.sides[0] || { extent: [0, 1] }, offset: 0 }];
    this.all = [Math.min(...views.map(view => view.side.extent[0] - view.offset)), Math.max(...views.map(view => view.side.extent[1] - view.offset))];
    let last = this.all[1], first = this.all[0];
    for (const { side, offset } of views) {
      first = Math.min(first, -offset);
      for (const track of side.tracks || []) if (track.length) last = Math.max(last, (track.end || track.start)[track.length - 1] - offset);
    }
    this.limits = [first, last];
  }

  set(t0, t1) {
    const [low, high] = this.limits, room = (high - low) * 0.03;
    const span = Math.min(Math.max(t1 - t0, 20), high - low + 2 * room), middle = (t0 + t1) / 2;
    this.t0 = Math.min(Math.max(middle - span / 2, low - room), high + room - span);
    this.t1 = this.t0 + span;
    if (this.rangeText) this.rangeText.textContent = `${time(span)} from ${time(this.t0)}`;
    this.draw();
  }
  fit() { const [low, high] = this.all, room = (high - low) * 0.01; this.set(low - room, high + room); }
  pan(share) { const by = (this.t1 - this.t0) * share; this.set(this.t0 + by, this.t1 + by); }
  zoom(factor, at) {
    const middle = at ?? (this.t0 + this.t1) / 2;
    this.set(middle - (middle - this.t0) * factor, middle + (this.t1 - middle) * factor);
  }

  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.redraw(); });
  }
  redraw() {
    const begin = performance.now();
    this.views.forEach(view => view.draw());
    this.strips.forEach(strip => strip.draw());
    return this.frameMs = performance.now() - begin;
  }

  tip(event, lines) {
    this.tipBox.replaceChildren(...lines.map((line, at) => el(at ? 'div' : 'strong', {}, line)));
    this.tipBox.hidden = false;
    const box = this.tipBox.getBoundingClientRect();
    const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 10 : event.clientX + 14;
    const y = event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 16;
    this.tipBox.style.left = Math.max(4, x) + 'px';
    this.tipBox.style.top = Math.max(4, y) + 'px';
  }
  hideTip() { this.tipBox.hidden = true; }
  iterationTip(side, i) {
    const list = side.iterations;
    const facts = list.facts.map((fact, at) => [fact, list.texts[list.fact[at][i]]]).filter(([, text]) => text).map(([fact, text]) => `${fact} ${text}`);
    return [[list.texts[list.label[i]], list.kinds[list.kind[i]].name].filter(Boolean).join(' '), time(list.wall[i]) + ' wall', ...facts];
  }

  iteration(side) { return this.chosen[side]; }
  // The iteration of the other side that belongs to this one.
  partner(side, index) {
    const pair = this.data.pairs.find(pair => pair[side] === index);
    if (pair) return pair[1 - side];
    const mine = this.sides[side].iterations, theirs = this.sides[1 - side].iterations;
    const kind = mine.kinds[mine.kind[index]].name, other = theirs.kinds.findIndex(k => k.name === kind);
    let place = 0;
    for (let i = 0; i < index; i++) if (mine.kind[i] === mine.kind[index]) place++;
    for (let i = 0; i < theirs.count; i++) if (theirs.kind[i] === other && place-- === 0) return i;
    return null;
  }
  selectIteration(side, index) {
    this.chosen = this.sides.map((_, at) => at === side ? index : this.sides.length === 2 ? this.partner(side, index) : null);
    const chosen = this.sides.map((one, at) => ({ side: one, index: this.chosen[at] }));
    this.budget.replaceChildren(...budget(this, chosen));
    for (const strip of this.strips) {
      const now = this.chosen[strip.side.index];
      if (now === null) continue;
      strip.canvas.setAttribute('aria-valuenow', now);
      strip.canvas.setAttribute('aria-valuetext', this.iterationTip(strip.side, now).join(', '));
    }
    const { start, wall } = this.sides[side].iterations;
    if (this.sides.length === 2) {
      // Both begin at 0.
      for (const view of this.views) {
        const now = this.chosen[view.side.index];
        if (now !== null) view.offset = view.side.iterations.start[now];
      }
      this.range();
      const widest = Math.max(...chosen.filter(one => one.index !== null).map(one => one.side.iterations.wall[one.index]), 1);
      this.set(-widest * 0.04, widest * 1.04);
    } else {
      this.set(start[index] - wall[index] * 0.04, start[index] + wall[index] * 1.04);
    }
  }
  stepIteration(by) {
    const side = this.chosen.findIndex(index => index !== null), at = Math.max(side, 0), list = this.sides[at].iterations;
    if (list.count) this.selectIteration(at, Math.max(0, Math.min(list.count - 1, side < 0 ? 0 : this.chosen[at] + by)));
  }

  // Finds events: by part of a name, /regular expression/, =exact name, cat:category, or a list of exact names.
  search(wanted, typed) {
    const list = Array.isArray(wanted) ? wanted : null, text = list ? list.map(name => '=' + name).join(' | ') : wanted;
    if (this.box && !typed) this.box.value = text;
    let test = null, category = null, wrong = false;
    const trimmed = text.trim();
    if (list) test = name => list.includes(name);
    else if (trimmed.startsWith('cat:')) category = trimmed.slice(4);
    else if (trimmed.startsWith('=')) { const exact = trimmed.slice(1); test = name => name === exact; }
    else if (/^\/.+\/$/.test(trimmed)) {
      try { const pattern = new RegExp(trimmed.slice(1, -1), 'i'); test = name => pattern.test(name); } catch { wrong = true; }
    } else if (trimmed) { const part = trimmed.toLowerCase(); test = name => name.toLowerCase().includes(part); }
    this.query = trimmed && !wrong ? trimmed : null;
    this.found = { count: 0, time: 0 };
    for (const side of this.sides) {
      const names = test && Uint8Array.from(side.strings, name => test(name) ? 1 : 0);
      const wantedCategory = category === null ? -1 : side.categories.findIndex(one => one.name === category);
      for (const track of side.tracks) {
        if (!track.end) continue;
        const keep = new Uint32Array(this.query ? track.length : 0);
        for (const lane of track.lanes) {
          lane.matches = null;
          if (!this.query) continue;
          let n = 0;
          for (let i = lane.from; i < lane.to; i++) {
            if (names ? track.names[i] >= 0 && names[track.names[i]] : track.category && track.category[i] === wantedCategory && wantedCategory >= 0) {
              keep[n++] = i;
              this.found.time += track.end[i] - track.start[i];
            }
          }
          lane.matches = keep.slice(0, n);
          this.found.count += n;
        }
      }
    }
    if (this.foundText) {
      this.foundText.textContent = wrong ? 'not a regular expression' : this.query
        ? `${count(this.found.count)} ${this.found.count === 1 ? 'match' : 'matches'}, ${time(this.found.time)} summed` : '';
    }
    this.draw();
  }
  // Goes to the next or previous match, seen from the chosen event or the middle of what is visible.
  step(by) {
    if (!this.query) return;
    let best = null;
    for (const view of this.views) {
      const now = this.selected && this.selected.side === view.side ? this.selected.track.start[this.selected.index] : (this.selected ? (this.t0 + this.t1) / 2 : by > 0 ? this.t0 : this.t1) + view.offset;
      for (const track of view.side.tracks) for (const lane of track.lanes || []) {
        if (!lane.matches || !lane.matches.length) continue;
        let low = 0, high = lane.matches.length;
        while (low < high) {
          const middle = (low + high) >> 1, start = track.start[lane.matches[middle]];
          if (by > 0 ? start > now : start >= now) high = middle; else low = middle + 1;
        }
        const index = lane.matches[by > 0 ? low : low - 1];
        if (index === undefined) continue;
        const distance = Math.abs(track.start[index] - now);
        if (!best || distance < best.distance) best = { distance, side: view.side, track, index };
      }
    }
    if (best) { this.select(best); this.reveal(best); }
  }
  neighbour(by) {
    const { selected } = this;
    if (!selected) {
      const view = this.views[0], track = view.side.tracks.find(track => track.end && track.length);
      if (track) this.select({ side: view.side, track, index: Math.min(track.lanes[0].to - 1, firstAbove(track.end, track.lanes[0].from, track.lanes[0].to, this.t0 + view.offset)) });
      return;
    }
    const lane = selected.track.lanes.find(lane => selected.index < lane.to), index = selected.index + by;
    if (index < lane.from || index >= lane.to) return;
    this.select({ ...selected, index });
    this.reveal(this.selected);
  }

  viewOf(place) { return this.views.find(view => view.side === place.side); }
  // Brings an event into view without changing the zoom, if it is visible at all there.
  reveal(place) {
    const view = this.viewOf(place), start = place.track.start[place.index] - view.offset, end = place.track.end[place.index] - view.offset;
    const span = this.t1 - this.t0;
    if (end - start < span / 2000) this.set(start - (end - start || 1) * 60, end + (end - start || 1) * 60);
    else if (start < this.t0 || end > this.t1) this.set((start + end - span) / 2, (start + end + span) / 2);
    this.scrollTo(place);
  }
  show(place) {
    const view = this.viewOf(place), start = place.track.start[place.index] - view.offset, end = place.track.end[place.index] - view.offset;
    const room = Math.max(10, (end - start) * 0.3);
    this.select({ side: place.side, track: place.track, index: place.index });
    this.set(start - room, end + room);
    this.scrollTo(place);
  }
  scrollTo(place) {
    const view = this.viewOf(place), item = view.items.find(item => item.track === place.track);
    if (!item) return;
    const y = item.y + (item.folded ? 0 : place.track.lanes.findIndex(lane => place.index < lane.to) * item.row);
    if (y < view.body.scrollTop + view.top) view.body.scrollTop = y - view.top - 30;
    else if (y + item.row > view.body.scrollTop + view.body.clientHeight) view.body.scrollTop = y - view.body.clientHeight + 60;
  }

  select(place) {
    this.selected = place && { side: place.side, track: place.track, index: place.index };
    this.linked = [];
    this.launches = false;
    if (place) {
      const { side, track, index } = place;
      if (track.link && track.link[index] >= 0) this.linked = [side.place(track.link[index])];
      else {
        const flat = side.flat(place);
        for (const other of side.tracks) {
          if (!other.link) continue;
          for (let i = 0; i < other.length; i++) if (other.link[i] === flat) this.linked.push({ side, track: other, index: i });
        }
        this.launches = this.linked.length > 0;
      }
    }
    this.describe();
    this.draw();
  }
  describe() {
    if (!this.details) return;
    if (!this.selected) return this.details.replaceChildren();
    const { side, track, index } = this.selected, name = side.text(track.names[index]);
    const facts = [['track', [track.group, track.name].filter(Boolean).join(' · ')]];
    if (this.sides.length > 1) facts.unshift(['side', side.name]);
    const category = track.category && side.categories[track.category[index]];
    if (category) facts.push(['category', category.name]);
    facts.push(['start', `${time(track.start[index])} after the first event; ${thousands((BigInt(side.origin) + BigInt(track.start[index])).toString())} ns in the trace`]);
    facts.push(['duration', `${time(track.end[index] - track.start[index])} (${exactTime(track.end[index] - track.start[index])})`]);
    if (track.detail && track.detail[index] >= 0) facts.push(['details', side.text(track.detail[index])]);
    if (track.correlation && track.correlation[index]) facts.push(['correlation', String(track.correlation[index])]);
    const go = (place, text) => el('button', { type: 'button', class: 'find', onclick: () => this.show(place) }, text);
    if (this.linked.length && !this.launches) {
      const call = this.linked[0], delay = track.start[index] - call.track.start[call.index];
      facts.push(['launched by', go(call, `${side.text(call.track.names[call.index])}, ${time(delay)} before it started`)]);
    } else if (this.launches) {
      const first = this.linked[0];
      facts.push(['launches', go(first, `${count(this.linked.length)} ${this.linked.length === 1 ? 'op' : 'ops'}, the first: ${shortName(side.text(first.track.names[first.index]))}`)]);
    }
    this.details.replaceChildren(
      el('div', { class: 'event' }, el('code', {}, name || '(no name)'),
        el('button', { type: 'button', onclick: () => this.show(this.selected) }, 'Zoom to it'),
        el('button', { type: 'button', onclick: () => this.search('=' + name) }, 'Find all of this name')),
      el('dl', {}, ...facts.flatMap(([term, text]) => [el('dt', {}, term), el('dd', {}, text)])));
  }

  // Shows a range while it is drawn, and what is in it once it stands.
  measure(range, done) {
    this.measured = range;
    this.draw();
    if (!done || !this.details) return;
    if (!range) return this.describe();
    const span = range[1] - range[0], rows = [];
    for (const view of this.views) {
      const groups = new Map();
      for (const track of view.side.tracks) if (track.kind === 'ops' && track.length) groups.set(track.group, [...(groups.get(track.group) || []), track]);
      for (const [group, tracks] of groups) {
        const { events, sum, busy } = measure(tracks, range[0] + view.offset, range[1] + view.offset);
        rows.push([this.sides.length > 1 ? `${view.side.name} · ${group}` : group, count(events), time(sum), time(busy), percent(busy / span)]);
      }
    }
    this.details.replaceChildren(el('div', { class: 'event' }, el('strong', {}, `Range of ${time(span)} (${exactTime(Math.round(span))})`),
      el('button', { type: 'button', onclick: () => this.set(...range) }, 'Zoom to it'), el('button', { type: 'button', onclick: () => this.measure(null, true) }, 'Drop it')),
      el('div', { class: 'scroll' }, el('table', { class: 'measured' }, el('thead', {}, el('tr', {}, ...['device', 'ops', 'sum of ops', 'busy (union)', 'busy share of range'].map((head, at) => el('th', { class: at ? 'n' : null }, head)))),
        el('tbody', {}, ...rows.map(row => el('tr', {}, ...row.map((text, at) => el('td', { class: at ? 'n' : null }, text))))))));
  }
}

// For tests only.
window.strobe = {
  ready: load().then(data => {
    const app = new App(data);
    Object.assign(window.strobe, {
      view: () => ({ t0: app.t0, t1: app.t1 }),
      selected: () => app.selected && { name: app.selected.side.text(app.selected.track.names[app.selected.index]), index: app.selected.index, linked: app.linked.length },
      matches: () => ({ query: app.query, ...app.found }),
      iteration: () => app.chosen,
      measured: () => app.measured,
      redraw: () => app.redraw(),
    });
    return true;
  }).catch(error => {
    for (const place of document.querySelectorAll('.loading')) place.textContent = 'This part needs a browser of 2023 or later: ' + error.message;
    throw error;
  }),
};
