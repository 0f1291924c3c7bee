// The AI SDK against a deployment: text, a stream, an object and a call of a tool, told as one line of JSON.
// node ai_sdk.mjs URL MODEL KEY MODULES, where MODULES is the folder in which npm put the packages.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, name, apiKey, modules] = process.argv.slice(2);
const find = createRequire(`${modules}/`);
const load = (module) => import(pathToFileURL(find.resolve(module)));
const { generateText, Output, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const provider = createOpenAICompatible({ name: "paceline", baseURL: `${url}/v1`, apiKey, supportsStructuredOutputs: true });
const asked = { model: provider(name), temperature: 0, maxOutputTokens: 64, maxRetries: 0 };
const question = "What is the capital of France, and what is it famous for?";
const city = z.object({ city: z.enum(["Paris", "Rome"]) });

const { text } = await generateText({ ...asked, prompt: question });
let streamed = "";
for await (const part of streamText({ ...asked, prompt: question }).textStream) streamed += part;
const { output } = await generateText({
  ...asked,
  prompt: "Which of Paris and Rome is the capital of France? Answer in JSON.",
  output: Output.object({ schema: city }),
});
const weather = tool({ description: "The weather of a city.", inputSchema: city });
const { toolCalls } = await generateText({ ...asked, prompt: question, tools: { weather }, toolChoice: "required" });
const calls = toolCalls.map((call) => ({ name: call.toolName, input: call.input }));
console.log(JSON.stringify({ text, streamed, output, calls }));
