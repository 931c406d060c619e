"use strict";
// One trajectory as a conversation: what was trained on, what was masked, and why it ended as it did.

const ENDINGS = {
  answered: "ended with its answer",
  length: "cut: the response is as long as it may be",
  turns: "cut: no turn was left",
  aborted: "the engine gave no token",
  deadline: "a deadline passed",
  infra_failed: "our infrastructure failed",
};
const VERDICTS = {
  equal: "the answer is the known one",
  different: "another value than the known one",
  needs_symbolic: "not compared by value: symbolic grading is off",
  unreadable: "the answer cannot be read",
  undecided: "no proof that it is equal",
  unevaluated: "the answer is still to be computed",
  no_answer: "no answer was found in the last turn",
  truncated_box: "the text ends inside its last box",
  several_answers: "several different answers",
  too_long: "the answer is too long to be one",
  no_ground_truth: "no answer is known",
  no_text: "the last turn is empty",
  infra_failed: "lost to our infrastructure: not graded",
};

function conversation(records, at, record) {
  const own = records.validation(at) ? "the model's own" : "trained on";
  const parts = [verdictLine(records, at, record, own)];
  if (!record) {
    parts.push(make("p", { className: "hint" }, "The texts of this prompt are left out of this file. To have them: "
      + `invoke report RUN --steps ${records.step(at)}, or a larger --max-mb.`));
    return make("div", { className: "conversation" }, ...parts);
  }
  if (record.infra_error) parts.push(make("p", { className: "lost" }, `lost: ${record.infra_error}`));
  parts.push(maskStrip(record, own), ...promptMessages(record));
  const segments = segmentsOf(record);
  record.turns.forEach((turn, number) => parts.push(...turnParts(turn, number, segments[number], own)));
  parts.push(make("p", { className: "ending" }, ENDINGS[records.word("stop", at)] ?? records.word("stop", at)));
  return make("div", { className: "conversation" }, ...parts);
}

function verdictLine(records, at, record, own) {
  const { columns } = records;
  const right = columns.accuracy[at] > 0;
  const verdict = records.word("verdict", at);
  const lost = columns.faults[at] & 16;
  const extracted = record ? record.extracted : records.word("answer", at);
  const truth = record ? record.truth : records.word("truth", at);
  return make("div", { className: "verdict" },
    make("span", { className: `badge ${lost ? "lost" : right ? "right" : "wrong"}` }, lost ? "lost" : right ? "right" : "wrong"),
    make("span", { className: "reason", title: verdict }, VERDICTS[verdict] ?? (verdict || "no verdict")),
    make("dl", {},
      make("dt", {}, "answer"), make("dd", { className: "mono" }, extracted || "none"),
      make("dt", {}, "expected"), make("dd", { className: "mono" }, truth || "none"),
      make("dt", {}, "reward"), make("dd", { className: "mono" }, shownNumber(columns.reward[at], 3)),
      make("dt", {}, "tokens"),
      make("dd", {}, `${(record ? record.prompt_tokens : "?").toLocaleString()} prompt, ${columns.tokens[at].toLocaleString()} `
        + `response: ${columns.trained[at].toLocaleString()} ${own}, `
        + `${(columns.tokens[at] - columns.trained[at]).toLocaleString()} masked`)));
}

// The response's mask as a bar: a piece for each run of ones or zeros, as long as it has tokens.
function maskStrip(record, own) {
  const strip = make("div", { className: "mask", title: `the response's mask: filled is ${own}, hatched is masked` });
  let on = record.mask[0];
  for (const length of record.mask.slice(1)) {
    const piece = make("span", { className: on ? "on" : "off", title: `${length} tokens ${on ? own : "masked"}` });
    piece.style.flexGrow = String(length);
    strip.append(piece);
    on = 1 - on;
  }
  return strip;
}

// For each turn, how many of its tokens are trained on, and how many tokens of the environment follow it.
function segmentsOf(record) {
  const ends = [];
  let position = 0;
  for (const length of record.mask.slice(1)) ends.push((position += length));
  const total = position;
  const onesBetween = (from, to) => {
    let on = record.mask[0], start = 0, ones = 0;
    for (const end of ends) {
      if (on) ones += Math.max(0, Math.min(end, to) - Math.max(start, from));
      start = end;
      on = 1 - on;
    }
    return ones;
  };
  const lost = onesBetween(0, total) === 0;
  let from = 0;
  return record.turns.map((turn) => {
    const to = Math.min(total, from + turn.tokens);
    // After a turn the environment speaks until the next run of ones; a lost trajectory has none to tell.
    let next = to, on = record.mask[0], start = 0;
    for (const end of ends) {
      if (!on && start <= to && to < end) next = end;
      start = end;
      on = 1 - on;
    }
    const segment = { trained: onesBetween(from, to), environment: lost ? null : next - to };
    from = lost ? to : next;
    return segment;
  });
}

function promptMessages(record) {
  const messages = record.prompt ?? [{ role: "prompt", content: "(this run's records hold no text of the prompt)" }];
  return messages.map((message, number) => block("masked prompt",
    [message.role, number ? null : `${record.prompt_tokens.toLocaleString()} tokens with the tool's description`, "never trained on"],
    make("div", { className: "prose" }, message.content)));
}

function turnParts(turn, number, segment, own) {
  const what = segment.trained === turn.tokens ? own : segment.trained ? `of which ${segment.trained} ${own}` : "masked";
  const body = [];
  const calls = [...turn.calls];
  for (const [text, isCall] of piecesOf(turn.text)) {
    const call = isCall ? calls.shift() : null;
    if (call) body.push(callCode(call)); else if (text.trim()) body.push(prose(text.trim()));
  }
  const model = block(segment.trained ? "trained" : "masked",
    [`assistant, turn ${number + 1}`, `${turn.tokens.toLocaleString()} tokens ${what}`, `${turn.generate_s.toFixed(1)} s`],
    ...body, ...calls.map(callCode), turn.calls.length ? asWritten(turn.text) : null);
  const outputs = turn.calls.map((call, at) => block(`masked tool ${call.status === "ok" ? "" : "bad"}`,
    [call.name || "tool", call.status.replaceAll("_", " "), `${call.elapsed_s.toFixed(2)} s`,
      at === 0 && segment.environment !== null ? `${segment.environment.toLocaleString()} tokens masked` : "masked"],
    make("pre", { className: "output" }, call.response || "(nothing)")));
  return [model, ...outputs];
}

// Texts between calls and the calls themselves, as the model wrote them.
function piecesOf(text) {
  return text.split(/(<tool_call>[\s\S]*?(?:<\/tool_call>|$))/).map((piece) => [piece, piece.startsWith("<tool_call>")]);
}

function callCode(call) {
  const code = codeOf(call);
  return call.status === "malformed" ? block("call bad", ["call that cannot be read", call.arguments]) : pythonCode(code);
}

function asWritten(text) {
  return make("details", {}, make("summary", {}, "as written"), make("pre", { className: "output" }, text));
}

// Text as it is; fenced Python coloured, boxed answers marked.
function prose(text) {
  const shown = make("div", { className: "prose" });
  text.split(/(```(?:python|py)?\n[\s\S]*?(?:```|$))/).forEach((piece) => {
    const fenced = piece.match(/^```(?:python|py)?\n([\s\S]*?)(?:```)?$/);
    if (fenced) shown.append(pythonCode(fenced[1].replace(/\n$/, "")));
    else piece.split(/(\\boxed\{[^{}\n]*(?:\{[^{}\n]*\}[^{}\n]*)*\})/).forEach((part, odd) => {
      shown.append(odd % 2 ? make("mark", {}, part) : part);
    });
  });
  return shown;
}

function block(kind, facts, ...body) {
  const [who, ...others] = facts.filter((fact) => fact !== null);
  return make("article", { className: kind },
    make("header", {}, make("strong", {}, who), ...others.map((fact) => make("span", {}, fact))), ...body);
}
