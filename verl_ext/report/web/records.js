"use strict";
// The data in the page: packed JSON in inert elements, unpacked when it is asked for.

async function unpack(id) {
  const packed = document.getElementById(id).textContent;
  const bytes = Uint8Array.fromBase64?.(packed) ?? Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

// All trajectories: columns at once, texts one pack at a time.
class Records {
  static KEPT = 6; // unpacked packs in memory

  constructor(index) {
    Object.assign(this, index); // files, columns, words, packs, faults, left_out, notes
    this.count = this.columns.reward.length;
    this.file = new Uint32Array(this.count);
    this.files.forEach(([, , , first], number) => this.file.fill(number, first));
    this.samples = new Map(); // by prompt: its trajectories
    this.columns.group.forEach((group, at) => {
      if (!this.samples.has(group)) this.samples.set(group, []);
      this.samples.get(group).push(at);
    });
    this.search = null; // one line of words for each trajectory, made when first needed
    this.unpacked = new Map();
  }

  step(at) { return this.files[this.file[at]][1]; }
  validation(at) { return this.files[this.file[at]][2]; }
  word(name, at) { return this.words[name][this.columns[name][at]]; }

  // "train-000012/37": the same trajectory in every report of the run.
  name(at) {
    const [file, , , first] = this.files[this.file[at]];
    return `${file}/${at - first}`;
  }

  at(name) {
    const [file, row] = name.split("/");
    const found = this.files.find(([known]) => known === file);
    const at = found ? found[3] + Number(row) : -1;
    return at >= 0 && at < this.count && this.name(at) === name ? at : -1;
  }

  line(at) {
    this.search ??= new Array(this.count);
    return (this.search[at] ??= ["problem", "answer", "truth", "verdict", "stop", "source"]
      .map((name) => this.word(name, at)).join(" ").toLowerCase());
  }

  packOf(at) {
    let low = 0, high = this.packs.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.packs[middle] <= at) low = middle; else high = middle - 1;
    }
    return low;
  }

  pack(number) {
    if (!this.unpacked.has(number)) {
      this.unpacked.set(number, unpack(`pack-${number}`).then(JSON.parse));
      if (this.unpacked.size > Records.KEPT) this.unpacked.delete(this.unpacked.keys().next().value);
    }
    return this.unpacked.get(number);
  }

  // The texts of one trajectory, null if they were left out of the page.
  async open(at) {
    const number = this.packOf(at);
    const { prompts, records } = await this.pack(number);
    const record = records[at - this.packs[number]];
    return record && { ...record, prompt: prompts[record.prompt] };
  }

  // Those of `candidates` whose texts hold the words; tells `progress` the share that is done.
  async searchTexts(words, candidates, progress, cancelled) {
    const needle = words.toLowerCase();
    const escaped = JSON.stringify(words).slice(1, -1).toLowerCase();
    const byPack = new Map();
    for (const at of candidates) {
      const number = this.packOf(at);
      if (!byPack.has(number)) byPack.set(number, []);
      byPack.get(number).push(at);
    }
    const found = new Set();
    let done = 0;
    for (const [number, rows] of byPack) {
      if (cancelled()) return null;
      const text = await unpack(`pack-${number}`);
      if (text.toLowerCase().includes(escaped)) { // read only where it may be
        const { prompts, records } = JSON.parse(text);
        for (const at of rows) {
          const record = records[at - this.packs[number]];
          if (record && textsOf({ ...record, prompt: prompts[record.prompt] }).some((one) => one.toLowerCase().includes(needle))) found.add(at);
        }
      }
      progress(++done / byPack.size);
    }
    return found;
  }
}

function textsOf(record) {
  const calls = record.turns.flatMap((turn) => turn.calls.flatMap((call) => [codeOf(call), call.response]));
  const prompt = (record.prompt ?? []).map((message) => message.content);
  return [record.id, record.infra_error, ...prompt, ...record.turns.map((turn) => turn.text), ...calls];
}

// The program of a call, or its arguments as they came.
function codeOf(call) {
  try {
    const { code } = JSON.parse(call.arguments);
    if (typeof code === "string") return code;
  } catch { /* what the model wrote is no JSON */ }
  return call.arguments;
}
