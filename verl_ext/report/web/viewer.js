"use strict";
// The list of trajectories, its filters, and up to two trajectories beside each other.

const ROW_PX = 28; // as in page.css
const LIST = [
  { name: "step", title: "step", value: (r, at) => r.step(at), text: (r, at) => `${r.step(at)}${r.validation(at) ? " val" : ""}` },
  { name: "right", title: "", value: (r, at) => r.columns.accuracy[at] ?? -1, text: markOf },
  { name: "reward", title: "reward", value: (r, at) => r.columns.reward[at] ?? -Infinity, text: (r, at) => shownNumber(r.columns.reward[at], 2) },
  { name: "turns", title: "turns", value: (r, at) => r.columns.turns[at], text: (r, at) => String(r.columns.turns[at]) },
  { name: "calls", title: "calls", value: (r, at) => r.columns.calls[at], text: (r, at) => String(r.columns.calls[at]) },
  { name: "tokens", title: "tokens", value: (r, at) => r.columns.tokens[at], text: (r, at) => r.columns.tokens[at].toLocaleString() },
  { name: "answer", title: "answer", value: (r, at) => r.word("answer", at), text: (r, at) => r.word("answer", at) || r.word("verdict", at) },
  { name: "problem", title: "problem", value: (r, at) => r.word("problem", at), text: (r, at) => r.word("problem", at) },
];

function markOf(records, at) {
  const faults = records.columns.faults[at];
  const right = faults & 16 ? "⊘" : records.columns.accuracy[at] > 0 ? "✓" : "✗";
  return right + (faults & 15 ? " !" : "");
}

class Viewer {
  constructor(records) {
    this.records = records;
    this.shown = [];
    this.sort = { column: LIST[0], down: false };
    this.inTexts = null; // what the search in texts found, and of which it was asked
    this.panes = []; // numbers of the opened trajectories, one or two
    this.searching = 0;
    this.form = document.getElementById("filters");
    this.body = document.getElementById("list-body");
    this.buildForm();
    this.buildList();
    this.filter();
    this.openFromAddress();
    addEventListener("hashchange", () => this.openFromAddress());
  }

  buildForm() {
    const { form, records } = this;
    records.faults.forEach((fault, bit) => form.fault.append(new Option(fault, String(1 << bit))));
    form.fault.append(new Option("none of these", "0"));
    for (const name of ["stop", "source"]) {
      records.words[name].forEach((word, number) => form[name].append(new Option(word || "(none)", String(number))));
    }
    form.querySelector(".source").hidden = records.words.source.length < 2;
    const changed = (words) => {
      this.searching++; // ends a search that is on
      if (words) this.inTexts = null;
      this.filter();
    };
    form.addEventListener("input", (event) => changed(event.target === form.words));
    form.addEventListener("reset", () => setTimeout(() => changed(true)));
    form.addEventListener("submit", (event) => { event.preventDefault(); this.searchInTexts(); });
  }

  buildList() {
    const head = document.getElementById("list-head");
    for (const column of LIST) {
      const button = make("button", { type: "button", className: column.name, title: `sort by ${column.name}` }, column.title || "✓");
      button.addEventListener("click", () => {
        this.sort = { column, down: this.sort.column === column && !this.sort.down };
        this.order();
      });
      head.append(button);
    }
    this.spacer = make("div", { className: "spacer" });
    this.rows = make("div", { className: "rows" });
    this.body.append(this.spacer, this.rows);
    this.body.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()));
    new ResizeObserver(() => this.draw()).observe(this.body);
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) this.choose(Number(row.dataset.at));
    });
    this.body.addEventListener("keydown", (event) => this.step(event));
  }

  step(event) {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20 }[event.key];
    if (!by || !this.shown.length) return;
    event.preventDefault();
    const place = this.shown.indexOf(this.panes[0]);
    const next = Math.max(0, Math.min(this.shown.length - 1, place < 0 ? 0 : place + by));
    this.reveal(next);
    this.choose(this.shown[next]);
  }

  // Scroll the list as little as it takes to see a row.
  reveal(place) {
    const top = place * ROW_PX, { scrollTop, clientHeight } = this.body;
    if (top < scrollTop) this.body.scrollTop = top;
    if (top + ROW_PX > scrollTop + clientHeight) this.body.scrollTop = top + ROW_PX - clientHeight;
  }

  filter() {
    const { form, records } = this;
    const { columns } = records;
    const number = (name, otherwise) => (form[name].value === "" ? otherwise : Number(form[name].value));
    const range = (name) => [number(`${name}_min`, -Infinity), number(`${name}_max`, Infinity)];
    const [steps, rewards, turns] = [range("step"), range("reward"), range("turns")];
    const within = (value, [low, high]) => value >= low && value <= high;
    const [kind, right, fault, stop, source] = ["kind", "right", "fault", "stop", "source"].map((name) => form[name].value);
    const found = [];
    for (let at = 0; at < records.count; at++) {
      if (kind && records.validation(at) !== Number(kind)) continue;
      if (!within(records.step(at), steps) || !within(columns.turns[at], turns)) continue;
      if ((form.reward_min.value || form.reward_max.value) && (columns.reward[at] === null || !within(columns.reward[at], rewards))) continue;
      if (right && (columns.accuracy[at] > 0) !== (right === "1")) continue;
      if (fault && (fault === "0" ? columns.faults[at] !== 0 : !(columns.faults[at] & Number(fault)))) continue;
      if (stop && columns.stop[at] !== Number(stop)) continue;
      if (source && columns.source[at] !== Number(source)) continue;
      found.push(at);
    }
    this.candidates = found;
    if (this.inTexts && found.some((at) => !this.inTexts.asked.has(at))) this.inTexts = null; // it knows too little now
    const words = form.words.value.trim().toLowerCase();
    if (this.inTexts) this.shown = found.filter((at) => this.inTexts.found.has(at));
    else this.shown = words ? found.filter((at) => records.line(at).includes(words)) : [...found];
    this.order();
    const where = this.inTexts ? " with these words" : words ? " by their columns; Enter looks into the texts" : "";
    const left = records.left_out ? `; the texts of ${records.left_out.toLocaleString()} are left out of this file` : "";
    this.say(`${this.shown.length.toLocaleString()} of ${records.count.toLocaleString()}${where}${left}`);
  }

  order() {
    const { column, down } = this.sort;
    const value = (at) => column.value(this.records, at);
    this.shown.sort((one, other) => {
      const a = value(one), b = value(other);
      return (a < b ? -1 : a > b ? 1 : one - other) * (down ? -1 : 1);
    });
    for (const [number, button] of [...document.getElementById("list-head").children].entries()) {
      button.dataset.sorted = LIST[number] === column ? (down ? "down" : "up") : "";
    }
    this.spacer.style.height = `${this.shown.length * ROW_PX}px`;
    this.body.scrollTop = 0;
    this.draw();
  }

  // Only the rows that can be seen are there.
  draw() {
    const first = Math.max(0, Math.floor(this.body.scrollTop / ROW_PX) - 5);
    const last = Math.min(this.shown.length, first + Math.ceil(this.body.clientHeight / ROW_PX) + 10);
    this.rows.style.transform = `translateY(${first * ROW_PX}px)`;
    this.rows.replaceChildren(...this.shown.slice(first, last).map((at) => this.row(at)));
  }

  row(at) {
    const { faults, accuracy } = this.records.columns;
    const state = faults[at] & 16 ? "lost" : accuracy[at] > 0 ? "right" : "wrong";
    const cells = LIST.map((column) => {
      const text = column.text(this.records, at);
      return make("span", { className: column.name, title: column.name === "problem" || column.name === "answer" ? text : "" }, text);
    });
    const row = make("div", { className: `row ${state}`, role: "option" }, ...cells);
    row.dataset.at = at;
    row.ariaSelected = String(this.panes.includes(at));
    return row;
  }

  say(text) { document.getElementById("shown").textContent = text; }

  async searchInTexts() {
    const words = this.form.words.value.trim();
    const mine = ++this.searching;
    const asked = new Set(this.candidates);
    if (!words) return;
    const found = await this.records.searchTexts(words, asked,
      (share) => { if (mine === this.searching) this.say(`searching, ${Math.round(share * 100)} %`); },
      () => mine !== this.searching);
    if (mine !== this.searching) return;
    this.inTexts = { found, asked };
    this.filter();
  }

  choose(at, beside = null) {
    this.panes = beside === null ? [at] : [at, beside];
    history.replaceState(null, "", `#trajectories=${this.panes.map((one) => this.records.name(one)).join("&")}`);
    this.draw();
    return this.show();
  }

  openFromAddress() {
    const names = location.hash.match(/^#trajectories=(.+)$/);
    if (!names) return;
    const [at, beside] = names[1].split("&").map((name) => this.records.at(name));
    if (!(at >= 0)) return;
    this.choose(at, beside >= 0 ? beside : null);
    this.reveal(this.shown.indexOf(at));
  }

  async show() {
    const panes = this.panes;
    const opened = await Promise.all(panes.map((at) => this.records.open(at)));
    if (panes !== this.panes) return; // another was chosen meanwhile
    const holder = document.getElementById("panes");
    holder.replaceChildren(...panes.map((at, side) => this.pane(at, opened[side], side)));
    holder.classList.toggle("two", panes.length === 2);
  }

  pane(at, record, side) {
    const { records, panes } = this;
    const problem = records.word("problem", at);
    const samples = records.samples.get(records.columns.group[at]);
    const head = make("header", {},
      make("strong", {}, `step ${records.step(at)}, ${records.validation(at) ? "validation" : "training"}`),
      make("span", { className: "mono", title: record ? record.id : "" }, problem),
      make("span", {}, `sample ${samples.indexOf(at) + 1} of ${samples.length}`));
    if (panes.length === 2) head.append(this.button("close", () => this.choose(panes[1 - side])));
    else if (samples.length > 1) head.append(this.button("beside another sample", () => this.choose(at, this.contrast(at, samples))));
    const chips = make("div", { className: "samples" }, ...samples.map((sample, number) => {
      const { accuracy, faults, reward } = records.columns;
      const state = faults[sample] & 16 ? "lost" : accuracy[sample] > 0 ? "right" : "wrong";
      const chip = this.button(String(number + 1), () => this.choose(...panes.map((one, place) => (place === side ? sample : one))));
      chip.className = `chip ${state}${sample === at ? " here" : ""}`;
      chip.title = `sample ${number + 1}: reward ${shownNumber(reward[sample], 2)}`;
      return chip;
    }));
    return make("div", { className: "pane" }, head, samples.length > 1 ? chips : null, conversation(records, at, record));
  }

  button(text, action) {
    const button = make("button", { type: "button" }, text);
    button.addEventListener("click", action);
    return button;
  }

  // The sample whose reward is farthest from this one's: the pair that says most.
  contrast(at, samples) {
    const { reward } = this.records.columns;
    const distance = (sample) => Math.abs((reward[sample] ?? 0) - (reward[at] ?? 0));
    return samples.filter((sample) => sample !== at).reduce((best, sample) => (distance(sample) > distance(best) ? sample : best));
  }
}
