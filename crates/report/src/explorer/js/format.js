// Numbers as the terminal prints them, and elements made without markup: names from a trace only ever become text.
const thousands = text => text.replace(/\B(?=(\d{3})+$)/g, ',');
const count = value => thousands(String(Math.round(value)));
const threeDigits = value => {
  const size = Math.abs(value);
  if (size >= 999.5) return (value < 0 ? '-' : '') + thousands(size.toFixed(0));
  return size >= 99.95 || value === 0 ? value.toFixed(0) : value.toFixed(size >= 9.995 ? 1 : 2);
};
const number = value => Number.isFinite(value)
  ? (value !== 0 && Math.abs(value) < 0.995 ? String(+value.toPrecision(3)) : threeDigits(value)) : 'n/a';
const percent = fraction => Number.isFinite(fraction) ? (fraction * 100).toFixed(1) + ' %' : 'n/a';
const time = ns => {
  if (!Number.isFinite(ns)) return 'n/a';
  if (Math.abs(ns) >= 119.5e9) return threeDigits(ns / 60e9) + ' min';
  const units = ['ns', 'µs', 'ms', 's'];
  let unit = 0;
  while (Math.abs(ns) >= 999.5 && unit < 3) { ns /= 1000; unit++; }
  return threeDigits(ns) + ' ' + units[unit];
};
const signed = (value, format) => (value > 0 ? '+' : '') + format(value);
// All digits: for the one event that is looked at.
const exactTime = ns => thousands(String(ns)) + ' ns';

const el = (tag, attributes, ...children) => {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith('on')) element.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(key, value === true ? '' : value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
};

// Text as nodes, code between backticks.
const withCode = text => text.split('`').map((piece, at) => at % 2 ? el('code', {}, piece) : piece);

// A kernel's name without return type, template arguments and parameters.
const shortName = name => {
  let short = name.replace(/^void /, '');
  const cut = short.search(/[<(]/);
  if (cut > 0) short = short.slice(0, cut);
  return short.slice(short.lastIndexOf('::') + 1).replace(/^:/, '') || name;
};

const theme = {
  // The value of a CSS variable under the present theme.
  color: variable => getComputedStyle(document.documentElement).getPropertyValue(variable).trim(),
  rgb: hex => [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16)),
  // Black or white, whichever has the higher contrast to a color.
  inkOn: hex => {
    const [r, g, b] = theme.rgb(hex).map(value => value / 255).map(value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? '#000000' : '#ffffff';
  },
};
