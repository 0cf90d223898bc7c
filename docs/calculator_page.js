// Fills calculator.md: reads its fields, and shows what calculator.js answers.
"use strict";

fetch("../calculator.json").then((response) => response.json()).then((constants) => {
  const field = (name) => document.getElementById(name);
  for (const name of constants.optimizers) field("optimizer").add(new Option(name, name));
  field("optimizer").add(new Option("another: the worst of these", ""));

  function row(cells) {
    const line = document.createElement("tr");
    for (const text of cells) line.appendChild(document.createElement("td")).textContent = text;
    return line;
  }

  function show() {
    if (!field("facts").checkValidity()) return;
    const number = (name) => Number(field(name).value);
    const facts = {
      parameters: Math.round(1e6 * number("parameters")),
      computeSeconds: number("compute"),
      bytesPerSecond: 1.25e8 * number("rate"),
      machines: number("machines"),
      optimizer: field("optimizer").value || null,
      steps: field("steps").value ? number("steps") : null,
    };
    const { ways, best } = answer(facts, constants);
    const line = best === constants.exact ? "leave DDP as it is" : `thinwire.attach(ddp_model, thinwire.${best})`;
    field("do-this").textContent = `Do this: ${line}`;
    field("ways").replaceChildren(
      row(["computing alone", (1e3 * facts.computeSeconds).toFixed(1), "", ""]),
      ...ways.map((way) => row([
        way.name === constants.exact ? `${way.name}, DDP as it is` : way.name,
        (1e3 * way.stepSeconds).toFixed(1),
        (way.sentBytes / 1e6).toPrecision(4),
        way.loss === null ? "?" : (Math.round(10 * way.loss) / 10 || 0).toFixed(1),
      ])),
    );
  }

  field("facts").addEventListener("input", show);
  field("facts").addEventListener("submit", (event) => event.preventDefault());
  show();
});
