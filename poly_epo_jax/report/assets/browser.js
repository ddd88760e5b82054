"use strict";
// Browser of generations: lists the filtered problems of a collection (see generations.py), and shows the generations of
// the selected problem by cluster.

const report = JSON.parse(document.getElementById("data").textContent);

function make(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const DEGENERATE = report.degenerate;
const control = Object.fromEntries(
  ["model", "part", "filter", "search", "left-out", "count", "problems", "problem"].map((id) => [id, document.getElementById(id)]));
const FILTERS = {
  all: () => true,
  solved: (problem) => problem.correct > 0,
  unsolved: (problem) => problem.correct === 0,
  mixed: (problem) => problem.correct > 0 && problem.correct < problem.size,
};
let chosen = null; // id of the selected problem, which is kept when another model is selected

const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;

function options(select, values) {
  const before = select.value;
  select.replaceChildren(...values.map((value) => Object.assign(make("option", "", value), { value })));
  if (values.includes(before)) select.value = before;
}

const collection = () =>
  report.collections.find((one) => one.model === control.model.value && one.part === control.part.value);

function contains(problem, text) {
  const texts = [problem.id, problem.prompt, ...problem.generations.map((generation) => generation.response)];
  return texts.some((one) => one.toLowerCase().includes(text));
}

function chooseModel() {
  options(control.part, report.collections.filter((one) => one.model === control.model.value).map((one) => one.part));
  chooseCollection();
}

function chooseCollection() {
  const { problems, all_problems, all_generations, file } = collection();
  const shown = problems.reduce((sum, problem) => sum + problem.generations.length, 0);
  control["left-out"].textContent =
    `Showing ${problems.length} of ${plural(all_problems, "problem")} and ` +
    `${shown} of ${plural(all_generations, "generation")}. Limits: ${report.bounds.problems} problems, ` +
    `${report.bounds.generations} generations per problem, ` +
    `${report.bounds.characters.toLocaleString("en")} characters per text. Full data: ${file}`;
  listProblems();
}

function listProblems() {
  const text = control.search.value.trim().toLowerCase();
  const all = collection().problems;
  const found = all.filter((problem) => FILTERS[control.filter.value](problem) && (!text || contains(problem, text)));
  control.count.textContent = `${found.length} of ${plural(all.length, "problem")}`;
  control.problems.replaceChildren(...found.map((problem) => {
    const about = make("span", "muted", `${problem.correct} of ${problem.size} correct`);
    const button = make("button", "", make("span", "text", problem.id), about);
    button.type = "button";
    button.dataset.problem = problem.id;
    button.addEventListener("click", () => {
      chosen = problem.id;
      showProblem(problem);
    });
    return make("li", "", button);
  }));
  showProblem(found.find((problem) => problem.id === chosen) ?? found[0]);
}

function showProblem(problem) {
  for (const button of control.problems.querySelectorAll("button"))
    button.setAttribute("aria-current", String(button.dataset.problem === problem?.id));
  if (!problem) {
    control.problem.replaceChildren(make("p", "muted", "No matching problems."));
    return;
  }
  const strategies = problem.clusters.filter(({ id }) => id !== null && id !== DEGENERATE).length;
  const clustering = problem.clusters.some(({ id }) => id === null) ? "not clustered" : plural(strategies, "cluster");
  control.problem.replaceChildren(
    make("h3", "", make("span", "text", problem.id)),
    make("p", "muted", `${problem.correct} of ${problem.size} correct, ${clustering}`),
    make("pre", "prompt", problem.prompt),
    problem.gold ? make("p", "", "Answer: ", make("span", "text", problem.gold)) : "",
    ...[...problem.clusters]
      .sort((a, b) => (a.id === DEGENERATE) - (b.id === DEGENERATE))
      .map((cluster) => showCluster(cluster, problem.generations.filter((generation) => generation.cluster === cluster.id))));
}

function showCluster({ id, size, correct }, generations) {
  const name = id === null ? "Not clustered" : id === DEGENERATE ? "Degenerate" : `Cluster ${id}`;
  const shown = generations.length === size ? "" : `, ${generations.length || "none"} shown`;
  const about = make("span", "muted", ` ${plural(size, "generation")}, ${correct} correct${shown}`);
  return make("section", "cluster", make("h4", "", name, about), ...generations.map(showGeneration));
}

function showGeneration(generation) {
  const about = [`generation ${generation.number}`];
  if (generation.advantage !== null) about.unshift(`advantage ${signed(generation.advantage)}`);
  if (generation.answer !== undefined) about.push(`answer ${generation.answer}`);
  if (generation.tokens !== undefined) about.push(plural(generation.tokens, "token"));
  if (generation.cut) about.push("truncated");
  const reward = make("span", generation.correct ? "right" : "wrong", `reward ${Number(generation.reward.toPrecision(3))}`);
  const opening = generation.response.trimStart().slice(0, 90).replaceAll("\n", " ");
  const summary = make("summary", "", reward, make("span", "muted text", ` · ${about.join(" · ")} `),
    make("span", "opening text", opening));
  const rationale = generation.rationale ? make("p", "rationale", "Judge: ", make("span", "text", generation.rationale)) : null;
  return make("details", "generation", summary, rationale, make("pre", "", generation.response));
}

if (report.collections.length) {
  document.getElementById("browser").hidden = false;
  options(control.model, [...new Set(report.collections.map((one) => one.model))]);
  control.model.addEventListener("change", chooseModel);
  control.part.addEventListener("change", chooseCollection);
  control.filter.addEventListener("change", listProblems);
  control.search.addEventListener("input", listProblems);
  chooseModel();
}
