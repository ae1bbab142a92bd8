// A table that searches, sorts and turns pages. Rows stay data until they are shown.
const cellText = cell => typeof cell === 'string' ? cell : cell[0];
const cellValue = cell => typeof cell === 'string' ? null : cell[1];

class TableView {
  constructor(table, find) {
    this.table = table;
    this.find = find;
    this.page = 0;
    this.size = 25;
    this.sorted = null;
    this.down = false;
    this.rows = table.rows;
    this.search = el('input', { type: 'search', placeholder: 'Filter rows', 'aria-label': 'Filter rows of ' + (table.title || 'the table'), oninput: () => this.update() });
    this.shown = el('span', { class: 'shown', role: 'status' });
    this.head = el('tr');
    this.body = el('tbody');
    this.pager = el('div', { class: 'pager' });
    table.headers.forEach((header, column) => {
      const button = el('button', { type: 'button', onclick: () => this.sort(column) }, header);
      this.head.append(el('th', { scope: 'col', class: table.right[column] ? 'n' : null }, button));
    });
    const few = table.rows.length <= 8;
    this.element = el('div', { class: 'table' },
      el('div', { class: 'tools' }, el('h3', {}, table.title), few ? null : this.search, this.shown),
      el('div', { class: 'scroll' }, el('table', { class: table.headers.length > 3 ? 'many' : null }, el('thead', {}, this.head), this.body, this.foot())),
      this.pager);
    this.update();
  }

  foot() {
    if (!this.table.totals.length) return null;
    return el('tfoot', {}, ...this.table.totals.map(row => this.line(row, false)));
  }

  sort(column) {
    const numbers = this.table.rows.some(row => cellValue(row[column]) !== null);
    this.down = this.sorted === column ? !this.down : numbers;
    this.sorted = column;
    [...this.head.cells].forEach((cell, at) =>
      at === column ? cell.setAttribute('aria-sort', this.down ? 'descending' : 'ascending') : cell.removeAttribute('aria-sort'));
    this.update();
  }

  update() {
    const wanted = this.search.value.trim().toLowerCase();
    let rows = this.table.rows;
    if (wanted) rows = rows.filter(row => row.some(cell => cellText(cell).toLowerCase().includes(wanted)));
    if (this.sorted !== null) {
      const column = this.sorted, sign = this.down ? -1 : 1;
      const numbers = rows.some(row => cellValue(row[column]) !== null);
      // What is not known comes last, whichever way the rest is sorted.
      const compare = (a, b) => {
        const x = cellValue(a[column]), y = cellValue(b[column]);
        if (!numbers) return sign * cellText(a[column]).localeCompare(cellText(b[column]), undefined, { numeric: true });
        if (x === null || y === null) return (x === null) - (y === null);
        return sign * (x - y);
      };
      rows = [...rows].sort(compare);
    }
    this.rows = rows;
    this.show(0);
  }

  show(page) {
    const pages = Math.max(1, Math.ceil(this.rows.length / this.size));
    this.page = Math.min(Math.max(page, 0), pages - 1);
    const from = this.page * this.size, to = Math.min(from + this.size, this.rows.length);
    this.body.replaceChildren(...this.rows.slice(from, to).map(row => this.line(row, true)));
    const all = this.table.rows.length;
    const filtered = this.rows.length < all ? ` of ${count(all)}` : '';
    this.shown.textContent = this.rows.length > this.size
      ? `${count(from + 1)} to ${count(to)} of ${count(this.rows.length)} rows${filtered && ` (${count(all)} in all)`}`
      : `${count(this.rows.length)}${filtered} ${all === 1 ? 'row' : 'rows'}`;
    const go = (label, title, target, off) =>
      el('button', { type: 'button', title, 'aria-label': title, disabled: off, onclick: () => this.show(target) }, label);
    const sizes = el('select', { 'aria-label': 'Rows per page', onchange: event => { this.size = +event.target.value; this.show(0); } },
      ...[25, 100, 1000].map(size => el('option', { value: size, selected: size === this.size }, `${count(size)} rows`)));
    this.pager.replaceChildren(...(this.rows.length > 25 ? [
      go('«', 'First page', 0, this.page === 0), go('‹', 'Previous page', this.page - 1, this.page === 0),
      el('span', {}, `page ${count(this.page + 1)} of ${count(pages)}`),
      go('›', 'Next page', this.page + 1, this.page + 1 >= pages), go('»', 'Last page', pages - 1, this.page + 1 >= pages), sizes] : []));
  }

  line(row, findable) {
    const line = el('tr');
    row.forEach((cell, column) => {
      const text = cellText(cell);
      const kind = this.table.right[column] ? 'n' : text.length > 60 ? 'long' : null;
      const finds = findable && this.find && text && this.table.find.includes(column);
      const names = () => [...new Set(this.table.find.map(at => cellText(row[at])).filter(Boolean))];
      line.append(el('td', { class: kind, 'data-l': column ? this.table.headers[column] : null }, finds
        ? el('button', { type: 'button', class: 'find', title: 'Show in the timeline: ' + text, onclick: () => this.find(names()) }, text)
        : text));
    });
    return line;
  }
}
