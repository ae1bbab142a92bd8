// Sorts a table by the column whose header is clicked: numbers by value, largest first; names by text.
for (const button of document.querySelectorAll('th button')) {
  button.addEventListener('click', () => {
    const header = button.closest('th'), table = button.closest('table'), body = table.tBodies[0];
    const column = header.cellIndex, rows = [...body.rows];
    const number = rows.some(row => row.cells[column].dataset.v !== undefined);
    const before = header.getAttribute('aria-sort');
    const down = before ? before === 'ascending' : number;
    // What is not known sorts below every number.
    const value = row => row.cells[column].dataset.v ?? -Number.MAX_VALUE;
    const compare = number
      ? (a, b) => value(a) - value(b)
      : (a, b) => a.cells[column].textContent.localeCompare(b.cells[column].textContent);
    rows.sort((a, b) => down ? compare(b, a) : compare(a, b));
    for (const other of header.parentNode.cells) other.removeAttribute('aria-sort');
    header.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    body.append(...rows);
  });
}
