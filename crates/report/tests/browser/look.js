// What is wrong with the look of this page at this width, as sentences; nothing where all is well.
(() => {
  const wrong = [], wide = document.documentElement.clientWidth, phone = wide <= 600;
  const visible = e => { const b = e.getBoundingClientRect(); return b.width > 0 && b.height > 0 && !e.closest('dialog:not([open]), .tip, script, style, noscript') && e.checkVisibility(); };
  const said = e => `<${e.tagName.toLowerCase()} class="${e.getAttribute('class') || ''}"> ${(e.textContent || '').trim().slice(0, 60)}`;
  const all = [...document.querySelectorAll('body *')].filter(visible);

  // Nothing beyond the edge, nothing cut. Raw text scrolls; so do wide tables, where there is a mouse.
  if (document.documentElement.scrollWidth > wide) wrong.push(`the page scrolls sideways: ${document.documentElement.scrollWidth} of ${wide} px`);
  for (const e of all) {
    if (e.closest('pre') || (!phone && e.closest('.scroll'))) continue;
    const box = e.getBoundingClientRect();
    if (box.left < -1 || box.right > wide + 1) wrong.push(`beyond the edge (${Math.round(box.left)} to ${Math.round(box.right)}): ${said(e)}`);
    const style = getComputedStyle(e);
    if (style.overflowY === 'hidden' && e.scrollHeight > e.clientHeight + 2 && !e.matches('.view')) wrong.push(`cut off, ${e.scrollHeight} in ${e.clientHeight} px of height: ${said(e)}`);
    if (style.overflowX !== 'visible' && e.scrollWidth > e.clientWidth + 1 && e.namespaceURI.endsWith('xhtml')) wrong.push(`cut off, ${e.scrollWidth} in ${e.clientWidth} px: ${said(e)}`);
  }

  // Labels of plots: inside the plot, apart from each other, large enough.
  for (const svg of all.filter(e => e.matches('svg.strobe-chart'))) {
    const frame = svg.getBoundingClientRect(), scale = frame.width / svg.viewBox.baseVal.width;
    const labels = [...svg.querySelectorAll('text')].map(e => ({ e, box: e.getBoundingClientRect() }));
    labels.forEach(({ e, box }, at) => {
      if (box.left < frame.left - 1.5 || box.right > frame.right + 1.5 || box.bottom > frame.bottom + 1.5) wrong.push(`outside its plot: ${said(e)} of ${svg.getAttribute('aria-label')}`);
      if (parseFloat(getComputedStyle(e).fontSize) * scale < 8.5) wrong.push(`too small: ${said(e)}`);
      for (const other of labels.slice(at + 1)) {
        const across = Math.min(box.right, other.box.right) - Math.max(box.left, other.box.left), down = Math.min(box.bottom, other.box.bottom) - Math.max(box.top, other.box.top);
        if (across > 2 && down > 4) wrong.push(`labels cover each other in ${svg.getAttribute('aria-label')}: ${said(e)} and ${said(other.e)}`);
      }
    });
  }

  // Contrast as WCAG 2 has it, of text to what lies behind it.
  const rgb = text => (text.match(/[\d.]+/g) || []).map(Number);
  const luminance = ([r, g, b]) => { const [x, y, z] = [r, g, b].map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * x + 0.7152 * y + 0.0722 * z; };
  const contrast = (a, b) => { const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y); return (high + 0.05) / (low + 0.05); };
  const behind = e => {
    for (; e; e = e.parentElement) {
      const color = rgb(getComputedStyle(e).backgroundColor);
      if (color.length && (color[3] === undefined || color[3] > 0.5)) return color;
    }
    return [255, 255, 255];
  };
  for (const e of all) {
    if (!e.matches(':not(:disabled)') || ![...e.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())) continue;
    const svg = e.closest('svg'), style = getComputedStyle(e);
    // Text in a mark follows its mark.
    const mark = e.matches('.inside, .on-light, .on-dark') && e.previousElementSibling;
    const found = contrast(rgb(svg ? style.fill : style.color), mark ? rgb(getComputedStyle(mark).fill) : behind(svg || e));
    if (found < 4.5) wrong.push(`hard to read (contrast ${found.toFixed(2)}): ${said(e)}`);
  }

  // A name has one color on the whole page, and no two share one unless they are very many.
  const colors = new Map();
  const note = (name, color) => { name = name.trim(); if (!colors.has(name)) colors.set(name, new Set()); colors.get(name).add(color); };
  const series = new Set(); // curves and bars of options, by their place in each plot
  for (const key of document.querySelectorAll('.strobe-chart .key')) {
    if (!visible(key)) continue;
    const name = key.nextElementSibling.textContent;
    note(name, getComputedStyle(key).fill);
    if (!key.getAttribute('style').includes('--n')) series.add(name.trim());
  }
  for (const key of document.querySelectorAll('.legend .key')) note(key.textContent, getComputedStyle(key.querySelector('i')).backgroundColor);
  for (const bar of document.querySelectorAll('.category')) for (const i of bar.querySelectorAll('i')) note(bar.querySelector('.name').textContent, getComputedStyle(i).backgroundColor);
  for (const swatch of document.querySelectorAll('.swatch')) note(swatch.parentElement.textContent, getComputedStyle(swatch).backgroundColor);
  for (const [name, found] of colors) if (found.size > 1) wrong.push(`${name} has several colors: ${[...found].join(', ')}`);
  const names = new Map();
  for (const [name, found] of colors) for (const color of found) names.set(color, [...(names.get(color) || []), name]);
  if (colors.size <= 16 && !series.size) for (const [color, same] of names) if (same.length > 1) wrong.push(`${same.join(' and ')} share ${color}`);
  for (const color of names.keys()) {
    const found = contrast(rgb(color), behind(document.querySelector('section')));
    if (found < 3) wrong.push(`hard to see (contrast ${found.toFixed(2)}): ${names.get(color).join(', ')}`);
  }

  // At most a dozen bars before folding.
  const bars = all.filter(e => e.matches('.category')).length;
  if (bars > 12) wrong.push(`${bars} bars are not folded`);

  // The answer is the first thing said.
  const answer = document.querySelector('h1').innerText.trim();
  if (!answer || !document.body.innerText.trim().startsWith(answer)) wrong.push(`the first line is not the answer: ${document.body.innerText.trim().slice(0, 80)}`);
  return [...new Set(wrong)].slice(0, 20);
})()
