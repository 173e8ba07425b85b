// The state of the forms, the address and the server's answers. All numbers come from the server.
"use strict";

const $ = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const EXPLORE = "explore", LIVE = [EXPLORE, "frontier", "accuracy"], RETRY_MS = 2000, LATE_MS = 200, PROGRESS_MS = 500;
const PARTS = { [EXPLORE]: [EXPLORE, "ops"] }; // questions of a view that has several
const due = new Set(); // charts that are still to be drawn
let view = EXPLORE, pinned = {}, other = {}, last = {}, running = null, told = "";

const form = (name = view) => $(`#form-${name}`);
const fields = (name = view) => all("[name]", form(name));

/** The form in the words of the command line: the keys of the plan as one text; what is empty is left out. */
function state() {
  const found = { ...other }, plan = other.plan ? [other.plan] : [];
  for (const field of fields()) {
    const value = field.value.trim();
    if (value && "key" in field.dataset) plan.push(`${field.name}=${value}`);
    else if (value) found[field.name] ??= value;
  }
  if (plan.length) found.plan = plan.join(",");
  return view === EXPLORE ? { ...found, ...pinned } : found;
}

/** Fill in the form; what its fields do not hold stays in `other`, for the server to judge. */
function write(values) {
  const plan = (values.plan || "").replace(/\blayout=(\w+):/, "layout=$1,grid=").split(",").filter(Boolean);
  other = { ...values };
  for (const field of fields()) {
    if ("key" in field.dataset) {
      const at = plan.findIndex((item) => item.startsWith(`${field.name}=`) && !item.endsWith("="));
      fill(field, at < 0 ? undefined : plan.splice(at, 1)[0].slice(field.name.length + 1));
    } else if (fill(field, values[field.name])) delete other[field.name];
  }
  if (view !== EXPLORE) return;
  pinned = Object.fromEntries(Object.entries(values).filter(([name]) => name.startsWith("a.")));
  for (const name of ["plan", ...Object.keys(pinned)]) delete other[name];
  if (plan.length) other.plan = plan.join(",");
}

/** Whether `field` holds `value` now (undefined: what it holds by itself). */
function fill(field, value) {
  if (field.tagName === "SELECT" && value && !all("option", field).some((one) => one.value === value)) {
    field.add(new Option(value, value));
  }
  const listed = field.tagName === "SELECT" || field.type === "range";
  field.value = value ?? (listed ? field.dataset.default : "");
  showValue(field);
  return field.type !== "range" || field.value === value;
}

function showValue(field) {
  if (field.type === "range") field.nextElementSibling.value = field.value;
}

/** One answer of the server; null where a newer question took its place. */
async function ask(what, asked, signal, name = "") {
  const headers = { "Content-Type": "application/json", "Question": name };
  const reply = await fetch(`api/${what}`, { method: "POST", headers, body: JSON.stringify(asked), signal });
  if (reply.headers.get("Content-Type") !== "application/json") throw new Error(await reply.text());
  return reply.json();
}

async function run() {
  running?.abort();
  const mine = (running = new AbortController()), asked = state(), of = view, page = $("#page");
  const name = `${Date.now()}-${Math.random()}`, late = setTimeout(() => wait(mine, name), LATE_MS);
  page.ariaBusy = "true";
  try {
    const answers = (PARTS[of] || [of]).map((part) => ask(part, asked, mine.signal, name)), sections = [];
    answers.slice(1).forEach((answer) => answer.catch(() => 0)); // the first one tells
    history.replaceState(null, "", `#${of}?${new URLSearchParams({ v: 1, ...asked })}`);
    $("[data-act=unpin]").hidden = !Object.keys(pinned).length;
    for (const [i, answer] of answers.entries()) {
      const found = await answer;
      alertOf("");
      if (found.error) return fail(found.error);
      if (i === 0) tell(found);
      sections.push(...found.sections);
      put(sections, i === answers.length - 1);
    }
  } catch (problem) {
    if (problem.name === "AbortError") return;
    alertOf("The server does not answer. Start it again with: meshwise web. The page asks again by itself.");
    setTimeout(() => mine === running && run(), RETRY_MS);
  } finally {
    clearTimeout(late);
    if (mine === running) {
      page.ariaBusy = "false";
      $("#progress").hidden = true;
      if (of === EXPLORE) offer(asked, mine.signal);
    }
  }
}

/** Dim what answers an earlier question, and say how far the answer to this one is. */
async function wait(mine, name) {
  document.body.classList.add("stale");
  while (mine === running && $("#page").ariaBusy === "true" && !mine.signal.aborted) {
    const { before, so_far } = await fetch(`api/progress/${name}`).then((reply) => reply.json()).catch(() => ({}));
    if (mine !== running || $("#page").ariaBusy !== "true") return;
    const line = before ? `${before} questions are answered before this one` : "";
    $("#progress span").textContent = line || so_far || "working";
    $("#progress").hidden = false;
    await new Promise((next) => setTimeout(next, PROGRESS_MS));
  }
}

function tell(found) {
  last = found;
  document.title = `${found.title} - meshwise`;
  headline(found.headline, found.ok ? "" : "no");
  for (const field of fields()) mark(field, "");
}

function headline(text, className) {
  Object.assign($("#headline"), { textContent: text, className });
}

/** Put the sections in place: one that says the same stays as it is, a chart is updated where it stands. */
function put(sections, isWhole) {
  const page = $("#page");
  if (isWhole) document.body.classList.remove("stale");
  page.inert = false;
  for (const [i, html] of sections.entries()) {
    const old = page.children[i], fresh = document.createElement("template");
    if (old?.html === html) continue;
    fresh.innerHTML = html;
    const section = changed(old, fresh.content.firstChild);
    section.html = html;
    if (section !== old) old ? old.replaceWith(section) : page.append(section);
    const chart = $(".chart", section);
    if (chart) due.add(chart);
  }
  while (isWhole && page.children.length > sections.length) page.lastChild.remove();
  for (const chart of due) if (chart.getBoundingClientRect().top < innerHeight) show(chart);
  setTimeout(showNext);
}

/** The section `old` with the words of `fresh`, where both hold the same chart; else `fresh`. */
function changed(old, fresh) {
  const chart = old && $(".chart", old), place = $(".chart", fresh);
  if (!chart || chart.id !== place?.id || !$(".scroll", old) !== !$(".scroll", fresh)) return fresh;
  chart.style.height = place.style.height;
  for (const part of all("h2, script, figcaption, summary, .scroll", fresh)) {
    $(part.className ? `.${part.className}` : part.tagName, old).innerHTML = part.innerHTML;
  }
  return old;
}

/** Draw a chart; its marks lead to where they say. */
function show(chart) {
  due.delete(chart);
  if (!chart.isConnected) return;
  const isNew = !chart.on;
  draw(chart);
  if (isNew) chart.on("plotly_click", ({ points: [point] }) => {
    if (String(point.customdata).startsWith("#")) location.hash = point.customdata;
  });
}

/** Draw the charts that are not in view, one after the other, while nothing else is to do. */
function showNext() {
  const [chart] = due;
  if (!chart) return;
  show(chart);
  setTimeout(showNext);
}

function alertOf(text) {
  $("#alert").textContent = text;
  $("#alert").hidden = !text;
}

/** A sentence that says what is wrong; the fields that it states, and the first that it names, are marked. */
function fail(sentence) {
  last = {};
  headline(sentence, "error");
  document.body.classList.remove("stale");
  $("#page").inert = !$("#page .drop");
  const typed = fields().filter((field) => field.tagName !== "SELECT" || "key" in field.dataset);
  const place = ({ name }, then = "\\b") => sentence.search(new RegExp(`\\b${name}${then}`));
  const first = Math.min(...typed.map((field) => place(field)).filter((at) => at >= 0));
  for (const field of typed) mark(field, place(field, "=") >= 0 || place(field) === first ? sentence : "");
}

function mark(field, reason) {
  field.parentNode.classList.toggle("bad", Boolean(reason));
  reason ? field.setAttribute("aria-invalid", "true") : field.removeAttribute("aria-invalid");
}

/** Offer the values of each key of the plan; those that are none here are grey, with the reason. */
async function offer(asked, signal) {
  const { "to": _, ...job } = asked;
  const found = await ask("options", job, signal).catch(() => ({}));
  if (!found.options) return;
  for (const [key, values] of Object.entries(found.options)) {
    const select = $(`[name="${key}"]`, form(EXPLORE)), chosen = select.value;
    if (select.tagName !== "SELECT" || select.offered === (select.offered = JSON.stringify([chosen, values]))) continue;
    const options = values.map(([value, reason]) => {
      const option = new Option(reason ? `${value} - ${reason}` : value, value, false, value === chosen);
      option.disabled = Boolean(reason) && value !== chosen;
      option.title = reason;
      return option;
    });
    if (chosen && !values.some(([value]) => value === chosen)) options.push(new Option(chosen, chosen, true, true));
    select.replaceChildren(select.options[0], ...options);
    select.value = chosen;
  }
}

function say(text, shownMs = 4000) {
  $("#said").textContent = text;
  clearTimeout(told);
  told = setTimeout(() => ($("#said").textContent = ""), shownMs);
}

/** All files of a dropped entry, each with its path below it. */
async function filesOf(entry) {
  if (entry.isFile) return [[entry.fullPath.slice(1), await new Promise((found, lost) => entry.file(found, lost))]];
  const reader = entry.createReader(), found = [];
  for (let more; (more = await new Promise((read, lost) => reader.readEntries(read, lost))).length; ) found.push(...more);
  return (await Promise.all(found.map(filesOf))).flat();
}

/** Send the traces of a folder to the server, and show them. */
async function send(files) {
  const traces = files.filter(([path]) => /\.json(\.gz)?$/.test(path)), field = $("[name=path]", form());
  if (!traces.length) return fail("The folder holds no trace: no file ends in .json or .json.gz.");
  const { folder } = await ask("drop", {});
  for (const [i, [path, file]] of traces.entries()) {
    say(`sending file ${i + 1} of ${traces.length}`);
    const place = path.split("/").map(encodeURIComponent).join("/");
    const reply = await fetch(`api/drop/${folder}/${place}`, { method: "PUT", body: file });
    const { error } = await reply.json();
    if (error) return fail(error);
  }
  say("");
  field.value = folder;
  run();
}

/** Browsers have a clipboard for https and for this machine alone; elsewhere an older command copies. */
async function toClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const put = (event) => event.preventDefault() || event.clipboardData.setData("text/plain", text);
  addEventListener("copy", put, { once: true });
  if (!document.execCommand("copy")) throw new Error(text);
}

const copy = (text, what, needs = "") => !text ? say("there is nothing to copy: the plan is not valid")
  : toClipboard(text).then(() => say(`${what} copied${needs}`), () => say(text, 60000));

const ACTS = {
  cancel() {
    running?.abort();
    headline("Stopped. What is dimmed answers an earlier question.", "");
  },
  link: () => copy(location.href, "link"),
  command: () => copy(last.command, "command", last.needs),
  python: () => copy(last.python, "Python", last.needs),
  pin() {
    pinned = Object.fromEntries(Object.entries(state()).filter(([name]) => !name.startsWith("a.") && name !== "to")
      .map(([name, value]) => [`a.${name}`, value]));
    run();
  },
  unpin() {
    pinned = {};
    $("[data-act=pin]").focus();
    run();
  },
  async machine() {
    const found = await ask("machine", state());
    if (found.error) return say(found.error);
    const field = $("[name=machine]", form());
    field.value = found.text;
    field.rows = 16;
    field.closest("details").open = true;
    if (!field.offsetParent) $("#drawer").click();
    field.focus();
  },
  async save() {
    const found = await ask("save", state());
    if (found.error) return say(found.error);
    const href = URL.createObjectURL(new Blob([found.text], { type: "text/html" }));
    Object.assign(document.createElement("a"), { href, download: found.name }).click();
    setTimeout(() => URL.revokeObjectURL(href));
    say(`${found.name} saved`);
  },
  async launch() {
    const found = await ask("launch", state());
    $("#launch-title").textContent = found.error ? "No launch settings" : found.title;
    const parts = found.error ? [paragraph(found.error)] : found.lines.map(paragraph);
    for (const file of found.files || []) {
      const head = document.createElement("h3"), text = document.createElement("pre"), button = document.createElement("button");
      head.textContent = file.path;
      text.textContent = file.text;
      text.tabIndex = 0;
      button.textContent = `Copy ${file.path}`;
      button.onclick = () => copy(file.text, file.path).then(() => (button.textContent = $("#said").textContent));
      parts.push(head, button, text);
    }
    $("#launch-files").replaceChildren(...parts);
    $("#launch").showModal();
  },
};

function paragraph(text) {
  const found = document.createElement("p");
  found.textContent = text;
  return found;
}

/** Show the view that the address names, in the state that it names. */
function open() {
  const [name, query] = location.hash.slice(1).split(/\?(.*)/s);
  if (name === "results") return;
  view = form(name) ? name : EXPLORE;
  const values = Object.fromEntries(new URLSearchParams(query || ""));
  delete values.v;
  other = {};
  if (query) write(values);
  for (const one of all("form[data-view]")) one.hidden = one !== form();
  for (const link of all("nav a")) {
    link.hash === `#${view}` ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }
  $(".explore").hidden = view !== EXPLORE;
  running?.abort();
  $("#page").replaceChildren();
  $("#page").inert = false;
  headline("", "");
  if (view !== "traces" || state().path) return run();
  headline("Drop a folder of profiler traces here, or choose or name one.", "");
  $("#page").append($("#drop-here").content.cloneNode(true));
  $("#page .drop button").onclick = () => $("[data-folder]", form()).click();
}

const THEMES = ["system", "light", "dark"];
function theme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("theme", name);
  $("#theme").textContent = `Theme: ${name}`;
  redraw();
}

$("#theme").onclick = () => theme(THEMES[(THEMES.indexOf(localStorage.getItem("theme") || "system") + 1) % 3]);
$("#drawer").onclick = () => $("#drawer").setAttribute("aria-expanded", $("#inputs").classList.toggle("open"));
$("#skip").onclick = (event) => {
  event.preventDefault();
  $("#results").focus();
};
$("#actions").onclick = $("#progress").onclick = (event) => ACTS[event.target.dataset.act]?.();
$("#inputs").addEventListener("input", ({ target }) => {
  showValue(target);
  other = {};
  if (LIVE.includes(view)) run();
});
$("#inputs").addEventListener("change", ({ target }) => {
  if ("folder" in target.dataset) send([...target.files].map((file) => [file.webkitRelativePath, file]));
  else if (!LIVE.includes(view)) run();
});
$("#inputs").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
for (const event of ["dragover", "drop"]) {
  $("#columns").addEventListener(event, async (drag) => {
    const takes = drag.target.name === "config" || view === "traces";
    if (!takes || !drag.dataTransfer.types.includes("Files")) return;
    drag.preventDefault();
    if (event !== "drop") return;
    if (view === "traces") {
      const entries = [...drag.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
      return send((await Promise.all(entries.map(filesOf))).flat());
    }
    drag.target.value = await drag.dataTransfer.files[0].text();
    run();
  });
}
addEventListener("hashchange", open);
theme(localStorage.getItem("theme") || "system");
open();
