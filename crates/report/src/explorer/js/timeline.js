// The tracks of one side on a canvas. Many events in one pixel are drawn as one: its color is that of the longest,
// its strength the share of the pixel that is busy. A frame thus costs pixels, not events.
const RULER = 22, BAND = 16, GROUP = 22, FOLDED = 12, GAP = 5;
const ROW = { ops: 18, calls: 15, ranges: 16, counter: 38 };
const LETTER = 6.1; // average width of a letter at 11 px
const STRENGTHS = 8;
const NARROW = 760, NARROW_GUTTER = 96, TRACK_PADDING = 30; // as in the style sheet

class Timeline {
  constructor(side, app) {
    this.side = side;
    this.app = app;
    this.offset = 0; // what page time 0 is on the side's clock: comparisons are aligned by it
    this.folded = new Set();
    this.hover = null;
    this.canvas = el('canvas', {
      class: 'tracks', tabindex: 0, role: 'application',
      'aria-label': `Timeline of ${side.name || 'the trace'}: arrows pan and zoom, comma and full stop step through events, 0 shows all, slash searches, question mark lists all keys`,
    });
    this.context = this.canvas.getContext('2d');
    this.gutter = el('div', { class: 'gutter' });
    this.body = el('div', { class: 'view' }, this.gutter, this.canvas);
    this.map = el('canvas', { class: 'minimap', 'aria-hidden': 'true' });
    this.element = el('div', { class: 'side' }, app.sides.length > 1 ? el('h3', {}, side.name) : null,
      el('div', { class: 'overview' }, el('span', {}, 'busy'), this.map), this.body);
    this.top = RULER + (side.iterations.count ? BAND : 0);
    this.longestWall = side.iterations.wall.reduce((a, b) => Math.max(a, b), 0);
    this.widen();
    this.layout();
    this.listen();
    const height = Math.min(this.height + 2, Math.max(260, innerHeight * (app.sides.length > 1 ? 0.38 : 0.62)));
    this.body.style.height = height + 'px';
    const resized = new ResizeObserver(() => { this.mapBase = null; if (this.narrow !== innerWidth <= NARROW) this.layout(); app.draw(); });
    resized.observe(this.body);
    // Also when the window moves to a screen with other pixels, where the browser can tell.
    try { resized.observe(this.canvas, { box: 'device-pixel-content-box' }); } catch { resized.observe(this.canvas); }
  }

  // Makes room for the names of the tracks, as far as it does not take too much from the timeline.
  widen() {
    const widest = (names, weight, room) => names.reduce((most, name) => Math.max(most, this.textWidth(name, weight) + room), 0);
    const tracks = widest(this.side.tracks.map(track => track.name), 400, TRACK_PADDING + 4), groups = widest(this.side.tracks.map(track => track.group), 650, 24);
    this.gutterWidth = Math.ceil(Math.min(340, Math.max(190, tracks, groups)));
    this.element.style.setProperty('--gutter', this.gutterWidth + 'px');
  }
  textWidth(text, weight) {
    this.context.font = `${weight} 12px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif`;
    return this.context.measureText(text).width;
  }
  // How high a name is that takes several lines; 0 where one line is enough.
  nameHeight(name) {
    const [room, line] = this.narrow ? [(NARROW_GUTTER - 18) * 12 / 10.5, 12] : [this.gutterWidth - TRACK_PADDING, 17], width = this.textWidth(name, 400);
    // Lines break between words: they are not all full.
    return width <= room ? 0 : (Math.ceil(width * 1.25 / room) + (width * 1.25 > 2 * room ? 1 : 0)) * line;
  }

  // Where every track stands, and its name beside it.
  layout() {
    let y = this.top + 2, group = null;
    this.narrow = innerWidth <= NARROW;
    this.items = [];
    const labels = [el('div', { class: 'corner', style: `height:${this.top}px` })];
    for (const track of this.side.tracks) {
      if (!track.length) continue;
      if (track.group !== group) {
        group = track.group;
        labels.push(el('div', { class: 'group', style: `top:${y}px;height:${GROUP}px`, title: group }, group));
        this.items.push({ y, height: GROUP, group });
        y += GROUP;
      }
      const folded = this.folded.has(track);
      const row = folded ? FOLDED : ROW[track.kind];
      const height = Math.max(this.nameHeight(track.name), track.kind === 'counter' || folded ? row : row * track.lanes.length);
      labels.push(el('button', {
        type: 'button', class: 'track', style: `top:${y}px;height:${height}px`, 'aria-expanded': String(!folded),
        title: `${track.name}: ${count(track.length)} ${track.kind === 'counter' ? 'samples' : 'events'}`,
        onclick: () => { folded ? this.folded.delete(track) : this.folded.add(track); this.layout(); this.app.draw(); },
      }, el('span', {}, track.name)));
      this.items.push({ y, height, row, track, folded });
      y += height + GAP;
    }
    this.height = y + 4;
    this.gutter.style.height = this.height + 'px';
    this.gutter.replaceChildren(...labels);
  }

  recolor() {
    const fill = hex => Array.from({ length: STRENGTHS }, (_, level) =>
      `rgba(${theme.rgb(hex)},${(0.3 + 0.7 * (level + 1) / STRENGTHS).toFixed(2)})`);
    const variables = this.side.categories.map(category => category.color);
    for (let slot = 0; slot < 13; slot++) variables.push('--c' + slot);
    const colors = variables.map(theme.color);
    this.fills = colors.map(fill);
    this.inks = colors.map(theme.inkOn);
    this.noFill = fill(theme.color('--unknown'));
    this.kinds = this.side.iterations.kinds.map(kind => theme.color(kind.color));
    this.ink = theme.color('--ink');
    this.muted = theme.color('--muted');
    this.grid = theme.color('--grid');
    this.paper = theme.color('--paper');
    this.soft = theme.color('--soft');
    this.accent = theme.color('--accent');
    this.mapBase = null;
  }

  fill(color, level) { return (this.fills[color] || this.noFill)[level]; }

  // Fits the canvas to its place and to the screen's real pixels.
  size(canvas) {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    const w = Math.max(1, Math.round(width * ratio)), h = Math.max(1, Math.round(height * ratio));
    if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
    const context = canvas.getContext('2d');
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    return { context, ratio, width, height };
  }

  draw() {
    if (!this.fills) this.recolor();
    this.canvas.style.height = this.body.clientHeight + 'px';
    const { context, ratio, width, height } = this.size(this.canvas);
    const { t0, t1 } = this.app;
    const pixel = (t1 - t0) / (width * ratio); // nanoseconds
    // Whole pixels, so that what is drawn as one stays one while panning.
    const begin = Math.round((t0 + this.offset) / pixel) * pixel;
    this.frame = { begin, end: begin + (t1 - t0), pixel, scale: 1 / (pixel * ratio), width, height, thin: 1 / ratio };
    this.scroll = this.body.scrollTop;
    context.fillStyle = this.paper;
    context.fillRect(0, 0, width, height);
    context.font = "11px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif";
    context.textBaseline = 'middle';
    const ticks = this.ticks(t1 - t0);
    this.drawGrid(ticks);
    context.save();
    context.beginPath();
    context.rect(0, this.top, width, height - this.top);
    context.clip();
    const dimmed = this.app.query !== null;
    for (const item of this.items) {
      const y = item.y - this.scroll;
      if (y + item.height < this.top || y > height) continue;
      if (!item.track) {
        context.fillStyle = this.soft;
        context.fillRect(0, y, width, item.height - 3);
      } else if (item.track.kind === 'counter') {
        this.drawCounter(item, y);
      } else {
        context.globalAlpha = dimmed ? 0.22 : 1;
        item.track.lanes.forEach((lane, at) => {
          const top = item.folded ? y : y + at * item.row;
          if (top + item.row < this.top || top > height) return;
          this.drawLane(item.track, lane, top, item.row - 1, item.folded);
        });
        context.globalAlpha = 1;
        if (dimmed) {
          item.track.lanes.forEach((lane, at) => {
            if (lane.matches) this.drawMatches(item.track, lane, item.folded ? y : y + at * item.row, item.row - 1);
          });
        }
      }
    }
    this.drawIterationLines();
    this.drawSelection();
    this.drawMeasure();
    context.restore();
    this.drawRuler(ticks);
    this.drawMap();
  }

  x(sideTime) { return (sideTime - this.frame.begin) * this.frame.scale; }

  drawLane(track, lane, y, height, plain) {
    const { context, fills } = this, { begin, end, pixel, scale, width, thin } = this.frame;
    const starts = track.start, ends = track.end, colors = track.color;
    let runX = 0, runEnd = -1, runFill = '';
    const flush = () => {
      if (runEnd > runX) { context.fillStyle = runFill; context.fillRect(runX, y, runEnd - runX, height); }
      runEnd = -1;
    };
    let i = firstAbove(ends, lane.from, lane.to, begin);
    // A mark without length at the very start ends where it begins.
    while (i > lane.from && starts[i - 1] >= begin) i--;
    while (i < lane.to && starts[i] < end) {
      const length = ends[i] - starts[i];
      if (length >= 2 * pixel) {
        flush();
        const x = Math.max((starts[i] - begin) * scale, -2), right = Math.min((ends[i] - begin) * scale, width + 2);
        const color = colors[i];
        context.fillStyle = this.fill(color, STRENGTHS - 1);
        const gap = right - x > 3 ? thin : 0;
        context.fillRect(x, y, right - x - gap, height);
        if (right - x > 26 && !plain) this.label(track, i, x, right, y, height, this.inks[color] || this.ink);
        i++;
        continue;
      }
      const column = Math.floor(starts[i] / pixel), columnEnd = (column + 1) * pixel;
      let next = firstFrom(starts, i + 1, lane.to, columnEnd);
      // The last one that begins here may be long enough to be seen by itself.
      if (next - i > 1 && ends[next - 1] - starts[next - 1] >= 2 * pixel) next--;
      const share = Math.min(1, (track.before[next] - track.before[i]) / pixel);
      const longest = next - i === 1 ? i : track.largest.of(i, next);
      const fill = (fills[colors[longest]] || this.noFill)[Math.min(STRENGTHS - 1, (share * STRENGTHS) | 0)];
      const x = (column * pixel - begin) * scale;
      if (fill === runFill && Math.abs(x - runEnd) < thin / 2) {
        runEnd = x + thin;
      } else {
        flush();
        runX = x; runEnd = x + thin; runFill = fill;
      }
      i = next;
    }
    flush();
  }

  label(track, i, x, right, y, height, ink) {
    const from = Math.max(x, 0) + 4, room = (Math.min(right, this.frame.width) - from - 3) / LETTER;
    if (room < 3) return;
    const full = this.side.text(track.names[i]);
    let text = track.kind === 'ops' ? shortName(full) : full;
    if (text.length > room) text = text.slice(0, Math.max(1, room - 1)) + '…';
    this.context.fillStyle = ink;
    this.context.fillText(text, from, y + height / 2 + 0.5);
  }

  drawMatches(track, lane, y, height) {
    const { context } = this, { begin, end, pixel, scale, thin } = this.frame;
    const found = lane.matches;
    let low = 0, high = found.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (track.end[found[middle]] >= begin) high = middle; else low = middle + 1;
    }
    let runX = 0, runEnd = -1, runFill = '';
    const flush = () => {
      if (runEnd > runX) { context.fillStyle = runFill; context.fillRect(runX, y, runEnd - runX, height); }
      runEnd = -1;
    };
    while (low < found.length && track.start[found[low]] < end) {
      const i = found[low++], x = (track.start[i] - begin) * scale, right = (track.end[i] - begin) * scale;
      const fill = this.fill(track.color[i], STRENGTHS - 1);
      if (right - x > 3) {
        flush();
        context.fillStyle = fill;
        context.fillRect(x, y, right - x, height);
        if (right - x > 26) this.label(track, i, x, right, y, height, this.inks[track.color[i]] || this.ink);
        context.fillStyle = this.ink;
        context.fillRect(x, y + height - 2, right - x, 2);
        continue;
      }
      // A match is never too thin to be seen, and those that would fall into the same pixels are skipped.
      const until = x + Math.max(2 * thin, right - x);
      if (fill === runFill && x - runEnd < thin) {
        runEnd = until;
      } else {
        flush();
        runX = x; runEnd = until; runFill = fill;
      }
      const after = track.start[i] + 2 * pixel;
      let top = found.length;
      for (let step = 1; low + step < top; step *= 2) if (track.start[found[low + step]] >= after) { top = low + step + 1; break; }
      while (low < top) {
        const middle = (low + top) >> 1;
        if (track.start[found[middle]] >= after) top = middle; else low = middle + 1;
      }
    }
    flush();
  }

  drawCounter(item, y) {
    const { context } = this, { begin, end, pixel, scale, width, thin } = this.frame, { track, height } = item;
    const top = track.top || 1, base = y + height - 2, room = height - 4;
    context.fillStyle = this.grid;
    context.fillRect(0, base, width, 1);
    let i = Math.max(0, firstAbove(track.start, 0, track.length, begin) - 1);
    context.fillStyle = this.fill(this.side.categories.length + 11, 4);
    while (i < track.length && track.start[i] < end) {
      const next = Math.max(i + 1, firstFrom(track.start, i, track.length, Math.max(track.start[i], begin) + pixel));
      const value = track.values[track.largest.of(i, next)];
      const until = next < track.length ? track.start[next] : track.start[next - 1];
      const x = (track.start[i] - begin) * scale, right = Math.max(x + thin, (until - begin) * scale);
      const tall = Math.max(0, Math.min(1, value / top)) * room;
      if (Number.isFinite(value)) context.fillRect(Math.max(x, -1), base - tall, Math.min(right, width + 1) - Math.max(x, -1), tall);
      i = next;
    }
    const most = `${number(track.top)} ${track.unit}`.trim();
    context.fillStyle = this.paper;
    context.globalAlpha = 0.8;
    context.fillRect(2, y, context.measureText(most).width + 4, 14);
    context.globalAlpha = 1;
    context.fillStyle = this.ink;
    context.fillText(most, 4, y + 7);
  }

  ticks(span) {
    const step = 10 ** Math.floor(Math.log10(span / 6));
    // Labels need their room.
    const most = Math.max(2, Math.min(8, this.frame.width / 75)), wide = [1, 2, 5, 10, 20, 50].find(factor => span / (step * factor) <= most) * step;
    return Math.max(1, wide);
  }

  drawGrid(step) {
    const { context } = this, { begin, end, height } = this.frame;
    context.fillStyle = this.grid;
    for (let t = Math.ceil((begin - this.offset) / step) * step; t + this.offset < end; t += step) {
      context.fillRect(Math.round(this.x(t + this.offset)), this.top, 1, height);
    }
  }

  drawRuler(step) {
    const { context } = this, { begin, end, width } = this.frame;
    context.fillStyle = this.paper;
    context.fillRect(0, 0, width, this.top);
    context.fillStyle = this.muted;
    for (let t = Math.ceil((begin - this.offset) / step) * step; t + this.offset < end; t += step) {
      const x = this.x(t + this.offset);
      context.fillRect(Math.round(x), RULER - 6, 1, 6);
      context.fillText(axisTime(t, step), x + 4, 9);
    }
    if (this.side.iterations.count) this.drawBand();
    context.fillStyle = this.grid;
    context.fillRect(0, this.top - 1, width, 1);
  }

  // The iterations that may be visible.
  iterationsFrom() {
    const { start, count } = this.side.iterations;
    return firstAbove(start, 0, count, this.frame.begin - this.longestWall);
  }

  drawBand() {
    const { context } = this, { begin, end, scale, thin, width } = this.frame, list = this.side.iterations;
    const chosen = this.app.iteration(this.side.index);
    let i = this.iterationsFrom(), until = -Infinity;
    for (; i < list.count && list.start[i] < end; i++) {
      const from = list.start[i], to = from + list.wall[i];
      const x = Math.max(-2, (from - begin) * scale), right = Math.min(width + 2, (to - begin) * scale);
      if (right <= until) continue;
      const color = this.kinds[list.kind[i]];
      context.globalAlpha = i === chosen ? 1 : 0.55;
      context.fillStyle = color;
      context.fillRect(x, RULER, Math.max(thin, right - x - (right - x > 3 ? 1 : 0)), BAND - 2);
      context.globalAlpha = 1;
      until = Math.max(x + thin, right);
      if (right - x > 30) {
        const text = list.texts[list.label[i]], from = Math.max(x, 0) + 4;
        const room = (Math.min(right, width) - from - 2) / LETTER;
        context.fillStyle = i === chosen ? theme.inkOn(color) : this.ink;
        if (room >= 2) context.fillText(text.length > room ? text.slice(0, room - 1) + '…' : text, from, RULER + BAND / 2 - 1);
      }
    }
  }

  drawIterationLines() {
    const { context } = this, { begin, end, scale, height } = this.frame, list = this.side.iterations;
    const chosen = this.app.iteration(this.side.index);
    if (chosen === null) return;
    const x = (list.start[chosen] - begin) * scale, right = x + list.wall[chosen] * scale;
    context.fillStyle = this.accent;
    context.fillRect(x, this.top, 1, height);
    context.fillRect(right, this.top, 1, height);
    context.globalAlpha = 0.05;
    context.fillRect(x, this.top, right - x, height);
    context.globalAlpha = 1;
  }

  // The rectangle of an event, if its track is on the canvas.
  box(place) {
    const item = this.items.find(item => item.track === place.track);
    if (!item) return null;
    const lane = place.track.lanes.findIndex(lane => place.index < lane.to);
    const y = item.y - this.scroll + (item.folded ? 0 : lane * item.row);
    const x = this.x(place.track.start[place.index]);
    return { x, y, width: Math.max(2, this.x(place.track.end[place.index]) - x), height: item.row - 1 };
  }

  drawSelection() {
    const { context } = this, { width } = this.frame, { selected } = this.app;
    const frame = (place, color, line) => {
      const box = this.box(place);
      if (!box) return null;
      const x = Math.max(-4, box.x), right = Math.min(width + 4, box.x + box.width);
      context.strokeStyle = color;
      context.lineWidth = line;
      if (right > x) context.strokeRect(x - 0.5, box.y - 0.5, right - x + 1, box.height + 1);
      return box;
    };
    if (this.hover) frame(this.hover, this.muted, 1);
    if (!selected || selected.side !== this.side) return;
    const box = frame(selected, this.ink, 2);
    const others = this.app.linked.map(place => ({ place, box: frame(place, this.accent, 2) }));
    context.strokeStyle = this.accent;
    context.fillStyle = this.accent;
    context.lineWidth = 1.5;
    for (const other of others.slice(0, 40)) {
      if (!box || !other.box) continue;
      // From the call to what it launched.
      const [from, to] = this.app.launches ? [box, other.box] : [other.box, box];
      const x = to.x, y = to.y + to.height / 2, bend = Math.max(20, Math.abs(x - from.x) / 3);
      const start = from.x + Math.min(from.width, 8) / 2, below = from.y > to.y;
      const startY = below ? from.y : from.y + from.height;
      context.beginPath();
      context.moveTo(start, startY);
      context.bezierCurveTo(start, startY + (below ? -30 : 30), x - bend, y, x - 1, y);
      context.stroke();
      context.beginPath();
      context.moveTo(x, y);
      context.lineTo(x - 7, y - 4);
      context.lineTo(x - 7, y + 4);
      context.fill();
    }
  }

  drawMeasure() {
    const range = this.app.measured;
    if (!range) return;
    const { context } = this, { height } = this.frame;
    const x = this.x(range[0] + this.offset), right = this.x(range[1] + this.offset);
    context.fillStyle = this.accent;
    context.globalAlpha = 0.14;
    context.fillRect(x, this.top, right - x, height);
    context.globalAlpha = 1;
    context.fillRect(x, this.top, 1, height);
    context.fillRect(right, this.top, 1, height);
    const text = time(range[1] - range[0]), wide = context.measureText(text).width;
    const middle = (x + right) / 2 - wide / 2;
    context.fillRect(middle - 6, height - 26, wide + 12, 18);
    context.fillStyle = theme.inkOn(this.accent);
    context.fillText(text, middle, height - 17);
  }

  // The whole trace: how busy the device tracks are, and the part that is seen.
  drawMap() {
    const { context, ratio, width, height } = this.size(this.map);
    const [low, high] = this.app.all;
    if (!this.mapBase || this.mapBase.width !== this.map.width || this.mapFor !== low + this.offset) {
      this.mapBase = el('canvas');
      this.mapBase.width = this.map.width;
      this.mapBase.height = this.map.height;
      this.mapFor = low + this.offset;
      const base = this.mapBase.getContext('2d');
      base.scale(ratio, ratio);
      base.fillStyle = this.soft;
      base.fillRect(0, 0, width, height);
      let tracks = this.side.tracks.filter(track => track.kind === 'ops' && track.length);
      if (!tracks.length) tracks = this.side.tracks.filter(track => track.kind !== 'counter' && track.length);
      const step = (high - low) / width, groups = new Set(tracks.map(track => track.group)).size || 1;
      base.fillStyle = this.accent;
      for (let x = 0; x < width; x++) {
        const from = low + this.offset + x * step;
        let busy = 0;
        for (const track of tracks) for (const lane of track.lanes) busy += busyIn(track, lane, from, from + step);
        const share = Math.min(1, busy / step / groups);
        base.globalAlpha = 0.75;
        if (busy > 0) base.fillRect(x, height - Math.max(1, share * height), 1, Math.max(1, share * height));
      }
    }
    context.save();
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.drawImage(this.mapBase, 0, 0);
    context.restore();
    const place = t => (t - low) / (high - low) * width;
    const x = place(this.app.t0), right = Math.max(x + 3, place(this.app.t1));
    context.fillStyle = this.paper;
    context.globalAlpha = 0.65;
    context.fillRect(0, 0, x, height);
    context.fillRect(right, 0, width - right, height);
    context.globalAlpha = 1;
    context.strokeStyle = this.ink;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, 0.5, right - x - 1, height - 1);
  }

  // What lies under a point of the canvas.
  hit(x, y) {
    const at = this.frame.begin + x / this.frame.scale;
    if (y < this.top) {
      if (y < RULER) return null;
      const list = this.side.iterations;
      for (let i = this.iterationsFrom(); i < list.count && list.start[i] <= at; i++) {
        if (at < list.start[i] + list.wall[i]) return { iteration: i };
      }
      return null;
    }
    const item = this.items.find(item => y + this.scroll >= item.y && y + this.scroll < item.y + item.height);
    if (!item || !item.track) return null;
    const track = item.track;
    if (track.kind === 'counter') {
      const index = firstAbove(track.start, 0, track.length, at) - 1;
      return index < 0 ? null : { track, index, counter: true };
    }
    const slack = 3 * this.frame.pixel;
    const lanes = item.folded ? track.lanes : [track.lanes[Math.floor((y + this.scroll - item.y) / item.row)]];
    for (const lane of lanes.filter(Boolean)) {
      const first = firstAbove(track.end, lane.from, lane.to, at - slack);
      if (first >= lane.to || track.start[first] > at + slack) continue;
      const last = firstFrom(track.start, first, lane.to, at + slack);
      const inside = firstAbove(track.end, lane.from, lane.to, at);
      const exact = inside < lane.to && track.start[inside] <= at && track.end[inside] - track.start[inside] >= 2 * this.frame.pixel;
      const index = exact ? inside : track.largest.of(first, Math.max(first + 1, last));
      return { side: this.side, track, index, many: exact ? 1 : last - first };
    }
    return null;
  }

  listen() {
    const { app, canvas, map } = this;
    let down = null;
    const point = event => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const timeAt = x => app.t0 + x / canvas.clientWidth * (app.t1 - app.t0);
    canvas.addEventListener('wheel', event => {
      // A page that is being scrolled goes on scrolling when the pointer comes to lie here.
      if (performance.now() - app.scrolledAt < 250) return;
      event.preventDefault();
      const unit = event.deltaMode === 1 ? 16 : 1;
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.shiftKey ? event.deltaY : 0;
      if (sideways) app.pan(sideways * unit / canvas.clientWidth);
      else app.zoom(Math.exp(event.deltaY * unit * 0.0022), timeAt(point(event)[0]));
    }, { passive: false });
    canvas.addEventListener('pointerdown', event => {
      if (event.button !== 0) return;
      canvas.setPointerCapture(event.pointerId);
      const [x, y] = point(event);
      down = { x, y, t0: app.t0, t1: app.t1, scroll: this.body.scrollTop, measures: event.shiftKey, moved: false };
      app.hideTip();
    });
    canvas.addEventListener('pointermove', event => {
      const [x, y] = point(event);
      app.pointer = timeAt(x);
      if (!down) return this.point(event, this.hit(x, y));
      if (Math.hypot(x - down.x, y - down.y) > 4) down.moved = true;
      if (!down.moved) return;
      if (down.measures) {
        app.measure([timeAt(down.x), timeAt(x)].sort((a, b) => a - b), false);
      } else {
        const by = (down.x - x) / canvas.clientWidth * (down.t1 - down.t0);
        this.body.scrollTop = down.scroll + down.y - y;
        app.set(down.t0 + by, down.t1 + by);
      }
    });
    canvas.addEventListener('pointerup', event => {
      if (!down) return;
      const { moved, measures } = down, [x, y] = point(event);
      down = null;
      if (measures && moved) return app.measure(app.measured, true);
      if (moved) return;
      const hit = this.hit(x, y);
      if (hit && hit.iteration !== undefined) app.selectIteration(this.side.index, hit.iteration);
      else app.select(hit && !hit.counter ? { side: this.side, track: hit.track, index: hit.index } : null);
    });
    canvas.addEventListener('pointercancel', () => { down = null; });
    canvas.addEventListener('pointerleave', () => { app.pointer = null; if (this.hover) { this.hover = null; app.draw(); } app.hideTip(); });
    canvas.addEventListener('dblclick', event => {
      const [x, y] = point(event), hit = this.hit(x, y);
      if (hit && hit.track && !hit.counter) app.show({ side: this.side, ...hit });
      else app.zoom(0.4, timeAt(x));
    });
    this.body.addEventListener('scroll', () => app.draw());

    const moveTo = event => {
      const box = map.getBoundingClientRect(), [low, high] = app.all, span = app.t1 - app.t0;
      const middle = low + (event.clientX - box.left) / box.width * (high - low);
      app.set(middle - span / 2, middle + span / 2);
    };
    map.addEventListener('pointerdown', event => { map.setPointerCapture(event.pointerId); moveTo(event); });
    map.addEventListener('pointermove', event => { if (event.buttons & 1) moveTo(event); });
  }

  point(event, hit) {
    const { app, side } = this;
    const before = this.hover;
    this.hover = hit && hit.track && !hit.counter ? hit : null;
    this.canvas.style.cursor = hit && !hit.counter ? 'pointer' : 'default';
    if ((before && before.index) !== (this.hover && this.hover.index) || (before && before.track) !== (this.hover && this.hover.track)) app.draw();
    if (!hit) return app.hideTip();
    if (hit.iteration !== undefined) return app.tip(event, app.iterationTip(side, hit.iteration));
    const { track, index } = hit;
    if (hit.counter) {
      return app.tip(event, [track.name, `${number(track.values[index])} ${track.unit}`, `at ${time(track.start[index] - this.offset)}`]);
    }
    const lines = [side.text(track.names[index]) || '(no name)', `${time(track.end[index] - track.start[index])} from ${time(track.start[index] - this.offset)}`];
    const category = track.category && side.categories[track.category[index]];
    if (category) lines.push(category.name);
    if (track.detail && track.detail[index] >= 0) lines.push(side.text(track.detail[index]));
    if (track.correlation && track.correlation[index]) lines.push('correlation ' + track.correlation[index]);
    if (hit.many > 1) lines.push(`the longest of ${count(hit.many)} events here: zoom in to tell them apart`);
    app.tip(event, lines);
  }
}

// A moment on the axis, with as many digits as its step needs.
const axisTime = (t, step) => {
  const [unit, name] = step >= 1e9 || Math.abs(t) >= 10e9 ? [1e9, 's'] : step >= 1e6 || Math.abs(t) >= 10e6 ? [1e6, 'ms'] : step >= 1e3 || Math.abs(t) >= 10e3 ? [1e3, 'µs'] : [1, 'ns'];
  const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(step / unit) - 1e-9)));
  return `${(t / unit).toFixed(digits)} ${name}`;
};
