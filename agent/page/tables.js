// A table whose rows are reused: an update changes the cells whose text has changed, and nothing
// else. A column is {name, text(row), value(row), number, share, wide}; it is sorted by value, or
// else by text.

export class Table {
  constructor(place, columns, { sort = 0, up = true, none }) {
    this.columns = columns;
    this.sort = sort;
    this.up = up;
    this.rows = [];
    this.lines = [];
    this.filter = '';
    const table = document.createElement('table');
    const head = table.createTHead().insertRow();
    this.heads = columns.map((c, i) => {
      const th = document.createElement('th');
      const button = document.createElement('button');
      button.type = 'button';
      button.textContent = c.name;
      th.scope = 'col';
      th.classList.toggle('number', Boolean(c.number));
      button.addEventListener('click', () => this.sortBy(i));
      th.append(button);
      head.append(th);
      return th;
    });
    this.body = table.createTBody();
    this.empty = document.createElement('div');
    this.empty.className = 'none';
    this.empty.textContent = none;
    place.append(table, this.empty);
    this.draw();
  }

  sortBy(i) {
    this.up = i === this.sort ? !this.up : !this.columns[i].number;
    this.sort = i;
    this.draw();
  }

  show(rows) {
    this.rows = rows;
    this.draw();
  }

  narrow(filter) {
    this.filter = filter;
    this.draw();
  }

  // shown returns the rows that have every word of the filter, sorted.
  shown() {
    const words = this.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row) => this.columns.map((c) => c.text(row)).join('\n').toLowerCase();
    const rows = words.length ? this.rows.filter((r) => words.every((w) => text(r).includes(w))) : [...this.rows];
    const c = this.columns[this.sort];
    const value = c.value ?? c.text;
    const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    const turn = this.up ? 1 : -1;
    return rows.sort((a, b) => turn * order(value(a) ?? -1, value(b) ?? -1));
  }

  draw() {
    const rows = this.shown();
    this.heads.forEach((th, i) => {
      th.setAttribute('aria-sort', i !== this.sort ? 'none' : this.up ? 'ascending' : 'descending');
    });
    this.empty.hidden = rows.length > 0;
    while (this.lines.length > rows.length) this.lines.pop().line.remove();
    while (this.lines.length < rows.length) this.lines.push(this.newLine());
    const most = this.columns.map((c) => (c.share ? Math.max(...rows.map((r) => c.value(r) ?? 0), 1e-9) : 0));
    rows.forEach((row, i) => this.fill(this.lines[i], row, most));
  }

  newLine() {
    const line = this.body.insertRow();
    const cells = this.columns.map((c) => {
      const td = line.insertCell();
      td.classList.toggle('number', Boolean(c.number));
      td.classList.toggle('share', Boolean(c.share));
      td.classList.toggle('wide', Boolean(c.wide));
      return td;
    });
    return { line, cells };
  }

  fill({ line, cells }, row, most) {
    if (line.dataset.alarm !== row.alarm) line.dataset.alarm = row.alarm;
    this.columns.forEach((c, i) => {
      const text = c.text(row);
      if (cells[i].textContent !== text) {
        cells[i].textContent = text;
        cells[i].title = text;
      }
      if (c.share) cells[i].style.setProperty('--share', ((c.value(row) ?? 0) / most[i]).toFixed(3));
    });
  }
}
