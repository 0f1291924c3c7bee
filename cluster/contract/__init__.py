"""What is asked of a deployment, between the surfaces that take requests and the router that serves them.

The forms of a request on its way:

1. a public message (`paceline.v1.inference_pb2`) or a JSON body (`cluster.frontdoor.openai_requests`), as it was sent;
2. ``generation.GenerationRequest``: the same for every surface, unchecked but for the lengths of lists;
3. ``plan.Plan``: tokenized, checked, every default resolved, the seed drawn. It holds the request as admitted, which is
   planned again to the same plan and is what the journal keeps, and one ``SequenceRequest`` for each choice;
4. a node's message (`paceline.v1.node_pb2.SequenceRequest`), written by `paceline.wire` on each attempt.

`generation` knows neither of the others. `plan` makes 3 of 2; `public_wire` makes 2 of 1. Answers become public
messages in `paceline.answer_wire`, which the SDK's fake server shares.
"""
