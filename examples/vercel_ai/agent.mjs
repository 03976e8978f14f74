// An agent of the Vercel AI SDK with one tool, streamed. Start a server first (`make serve`), then:
//
//     cd examples/vercel_ai && npm install
//     node agent.mjs http://127.0.0.1:8000 smollm2-135m
//
// The call is forced by `toolChoice`, because the small model would not make it by itself.

import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [url = 'http://127.0.0.1:8000', name = 'smollm2-135m'] = process.argv.slice(2);
const agentserve = createOpenAICompatible({
  name: 'agentserve',
  baseURL: `${url}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});

const result = streamText({
  model: agentserve(name),
  prompt: 'What is the weather in Oslo?',
  maxOutputTokens: 100,
  temperature: 0,
  tools: {
    weather: tool({
      description: 'Weather of a city.',
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => {
        console.log(`tool: weather(${city})`);
        return { sky: 'rain', degrees: 4 };
      },
    }),
  },
  // the first step calls the tool, the second answers
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: 'tool', toolName: 'weather' } : 'none' }),
  stopWhen: stepCountIs(2),
  onError: ({ error }) => {
    console.error(error);
    process.exitCode = 1;
  },
});

let said = '';
for await (const piece of result.textStream) said += piece;
console.log(`answer: ${said}`);
for (const step of await result.steps) {
  const { inputTokens, cachedInputTokens, outputTokens } = step.usage;
  console.log(`step: ${step.finishReason}, ${inputTokens} in, ${cachedInputTokens} cached, ${outputTokens} out`);
}
