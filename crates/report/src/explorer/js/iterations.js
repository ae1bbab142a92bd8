// From this ratio on kinds of iteration get a strip each, on its own scale.
const FAR_APART = 3, STRIP = 84, LANE = 58;

// How long iterations take, all or those of a kind.
const spread = (list, only) => {
  const sorted = Float64Array.from(only === null ? list.wall : list.wall.filter((_, i) => list.kind[i] === only)).sort();
  const at = share => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))] || 1;
  // One very slow iteration must not flatten all others: it is cut and marked.
  return { middle: at(0.5), most: at(1), scale: Math.min(at(1), Math.max(4 * at(0.5), 1.2 * at(0.9))) || 1 };
};

// One bar per iteration, as tall as its wall; several in one pixel show the slowest. The chosen one's budget below.
class Strip {
  constructor(side, app) {
    this.side = side;
    this.app = app;
    this.list = side.iterations;
    this.canvas = el('canvas', {
      class: 'strip', tabindex: 0, role: 'slider', 'aria-label': `Iterations of ${side.name || 'the trace'}`,
      'aria-valuemin': 0, 'aria-valuemax': this.list.count - 1, 'aria-valuetext': 'none chosen',
    });
    this.lanes = this.split();
    this.canvas.style.height = (this.lanes.length > 1 ? LANE * this.lanes.length : STRIP) + 'px';
    const legend = this.list.kinds.map(kind => el('span', { class: 'key' }, el('i', { style: `background:var(${kind.color})` }), kind.name || 'kind not known'));
    const own = this.lanes.length > 1 ? ', each kind on its own scale' : '', cut = this.lanes.some(lane => lane.cut) ? '; bars under a line are cut' : '';
    this.element = el('div', { class: 'strip-row' },
      el('div', { class: 'legend' }, app.sides.length > 1 ? el('strong', {}, side.name) : null, ...legend,
        el('span', { class: 'note' }, `${count(this.list.count)} iterations, height = wall time${own}${cut}`)), this.canvas);
    this.canvas.addEventListener('pointermove', event => app.tip(event, app.iterationTip(side, this.at(event))));
    this.canvas.addEventListener('pointerleave', () => app.hideTip());
    this.canvas.addEventListener('click', event => { app.hideTip(); app.selectIteration(side.index, this.at(event)); });
    this.canvas.addEventListener('keydown', event => {
      const now = app.iteration(side.index), last = this.list.count - 1, none = now === null;
      const to = { ArrowLeft: none ? last : now - 1, ArrowRight: none ? 0 : now + 1, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      app.selectIteration(side.index, Math.max(0, Math.min(last, to)));
    });
    new ResizeObserver(() => app.draw()).observe(this.canvas);
  }

  // The strips below each other: one, or one per kind where kinds are too far apart for one scale. Sides that are compared
  // have the same scales.
  split() {
    const { wall, kind, kinds } = this.list, sides = this.app.sides.map(side => side.iterations).filter(list => list.count);
    const usual = sides.map(list => list.kinds.map((_, only) => spread(list, only).middle));
    const apart = usual.some(middles => middles.length > 1 && Math.max(...middles) > FAR_APART * Math.min(...middles));
    return (apart ? kinds.map((_, only) => only) : [null]).map(only => {
      const same = list => only === null ? null : list.kinds.findIndex(one => one.name === kinds[only].name);
      const scale = Math.max(...sides.filter(list => same(list) !== -1).map(list => spread(list, same(list)).scale));
      const values = only === null ? wall : wall.map((ns, i) => kind[i] === only ? ns : -1);
      return { only, scale, cut: spread(this.list, only).most > scale, largest: new Largest(values) };
    });
  }

  // The iterations that share a pixel, and how wide one is.
  columns(width) {
    const each = Math.min(48, width / this.list.count);
    return { each, shown: Math.max(1, Math.round(Math.min(width, each * this.list.count))) };
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect(), { each } = this.columns(box.width), x = event.clientX - box.left;
    const clamp = i => Math.max(0, Math.min(this.list.count - 1, i));
    if (each >= 1) return clamp(Math.floor(x / each));
    const from = clamp(Math.floor(Math.floor(x) / each)), to = clamp(Math.ceil((Math.floor(x) + 1) / each) - 1) + 1;
    const lane = this.lanes[Math.max(0, Math.min(this.lanes.length - 1, Math.floor((event.clientY - box.top) / box.height * this.lanes.length)))];
    return lane.largest.of(from, to);
  }

  draw() {
    const view = { ratio: devicePixelRatio || 1, width: this.canvas.clientWidth, height: this.canvas.clientHeight };
    this.canvas.width = Math.round(view.width * view.ratio);
    this.canvas.height = Math.round(view.height * view.ratio);
    const context = this.canvas.getContext('2d'), { list } = this, { width, height } = view;
    context.scale(view.ratio, view.ratio);
    context.font = "11px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif";
    const colors = list.kinds.map(kind => theme.color(kind.color)), ink = theme.color('--ink'), chosen = this.app.iteration(this.side.index);
    const { each } = this.columns(width), wide = Math.max(1, each), lane = height / this.lanes.length;
    this.lanes.forEach(({ only, scale, largest }, place) => {
      // A lane of its own is named, above its bars.
      const floor = lane * (place + 1) - 2, room = lane - (only === null ? 10 : 20);
      const bar = (x, i) => {
        if (only !== null && list.kind[i] !== only) return;
        const tall = Math.max(1, Math.min(1, list.wall[i] / scale) * room);
        context.fillStyle = colors[list.kind[i]];
        context.fillRect(x, floor - tall, wide - (wide > 3 ? 1 : 0), tall);
        if (list.wall[i] > scale) { context.fillStyle = ink; context.fillRect(x, floor - 3 - tall, wide - (wide > 3 ? 1 : 0), 2); }
      };
      if (each >= 1) {
        for (let i = 0; i < list.count; i++) bar(i * each, i);
      } else {
        for (let x = 0; x < width; x++) {
          const from = Math.floor(x / each), to = Math.min(list.count, Math.ceil((x + 1) / each));
          if (from < to) bar(x, largest.of(from, to));
        }
      }
      if (only === null) return;
      context.fillStyle = theme.color('--muted');
      context.fillText(`${list.kinds[only].name || 'kind not known'}, to ${time(scale)}`, 4, lane * place + 12);
    });
    if (chosen !== null) {
      const x = chosen * each;
      context.strokeStyle = ink;
      context.lineWidth = 2;
      context.strokeRect(x - 1, 1, Math.max(3, wide) + 1, height - 2);
    }
  }
}

// The budgets of the chosen iterations: bars on one scale, and a table whose parts add up to the wall.
const budget = (app, chosen) => {
  const present = chosen.filter(choice => choice.index !== null);
  if (!present.length) return [el('p', { class: 'hint' }, 'Choose an iteration: click a bar, or focus the strip and use the arrow keys.')];
  const widest = Math.max(...present.map(({ side, index }) => side.iterations.wall[index]), 1);
  const out = [];
  const names = [];
  const split = present.map(({ side, index }) => {
    const list = side.iterations, parts = new Map();
    list.parts.forEach((part, at) => {
      if (!names.includes(part.name)) names.push(part.name);
      if (list.part[at][index] >= 0) parts.set(part.name, list.part[at][index]);
    });
    const sum = [...parts.values()].reduce((a, b) => a + b, 0);
    return { side, index, list, parts, sum, wall: list.wall[index] };
  });
  const colors = new Map(split.flatMap(({ list }) => list.parts.map(part => [part.name, part.color])));
  for (const { side, index, list, parts, wall, sum } of split) {
    const facts = list.facts.map((fact, at) => [fact, list.texts[list.fact[at][index]]]).filter(([, text]) => text);
    const title = [app.sides.length > 1 ? side.name + ':' : '', list.texts[list.label[index]], list.kinds[list.kind[index]].name].filter(Boolean).join(' ');
    out.push(el('div', { class: 'chosen' }, el('strong', {}, title), el('span', { class: 'wall' }, time(wall) + ' wall'),
      ...facts.map(([fact, text]) => el('span', { class: 'fact' }, `${fact} `, el('b', {}, text)))));
    if (parts.size) {
      const bar = el('div', { class: 'stack', role: 'img', 'aria-label': 'Budget of ' + title, style: `width:${(Math.max(wall, sum) / widest * 100).toFixed(2)}%` });
      for (const [name, ns] of parts) {
        if (ns > 0) bar.append(el('i', { style: `flex:${ns} 0 0;background:var(${colors.get(name)})`, title: `${name}: ${time(ns)} (${percent(ns / wall)} of the wall)` }));
      }
      if (wall > sum) bar.append(el('i', { class: 'rest', style: `flex:${wall - sum} 0 0`, title: `in no part: ${time(wall - sum)}` }));
      out.push(bar);
    }
  }
  if (names.length) out.push(budgetTable(split, names, colors));
  return out;
};

const budgetTable = (split, names, colors) => {
  const two = split.length === 2;
  const head = el('tr', {}, el('th', {}, 'part'));
  for (const { side } of split) head.append(el('th', { class: 'n' }, two ? side.name : 'time'), el('th', { class: 'n' }, 'share of wall'));
  if (two) head.append(el('th', { class: 'n' }, 'difference'));
  const line = (name, color, values) => {
    const row = el('tr', {}, el('td', {}, color ? el('i', { class: 'swatch', style: `background:var(${color})` }) : null, name));
    values.forEach((ns, at) => row.append(el('td', { class: 'n' }, ns === undefined ? 'n/a' : time(ns)), el('td', { class: 'n' }, ns === undefined ? '' : percent(ns / split[at].wall))));
    if (two) row.append(el('td', { class: 'n' }, values.includes(undefined) ? 'n/a' : signed(values[1] - values[0], time)));
    return row;
  };
  const body = el('tbody'), known = name => split.some(({ parts }) => (parts.get(name) || 0) > 0 || (!parts.has(name) && split.length === 1));
  for (const name of names.filter(known)) body.append(line(name, colors.get(name), split.map(({ parts }) => parts.get(name))));
  if (split.some(({ sum, wall }) => sum !== wall)) body.append(line('in no part', null, split.map(({ sum, wall }) => wall - sum)));
  const foot = el('tfoot', {}, line('wall', null, split.map(({ wall }) => wall)));
  return el('div', { class: 'scroll' }, el('table', { class: 'budget' }, el('thead', {}, head), body, foot));
};
