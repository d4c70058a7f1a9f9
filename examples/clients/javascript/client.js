// Lists the datastores of a server, and streams a continuation with the source of each token.
//
//   npm install && node client.js localhost:50051 "def main("
import { readFileSync } from 'node:fs'
import grpc from '@grpc/grpc-js'
import loader from '@grpc/proto-loader'

const contract = readFileSync(new URL('../../../proto/memlm.binpb', import.meta.url))
const options = { keepCase: true, longs: Number, enums: String, oneofs: true }
const definition = loader.loadFileDescriptorSetFromBuffer(contract, options)
const { memlm } = grpc.loadPackageDefinition(definition)

const [target = 'localhost:50051', prompt = 'def main('] = process.argv.slice(2)
const metadata = new grpc.Metadata()
if (process.env.MEMLM_TOKEN) metadata.set('authorization', `Bearer ${process.env.MEMLM_TOKEN}`)

const datastores = new memlm.v1.Datastores(target, grpc.credentials.createInsecure())
datastores.ListDatastores({}, metadata, (error, answer) => {
  if (error) return fail(error)
  for (const store of answer.datastores) console.log(`${store.name}: ${store.num_entries} entries`)
  generate()
})

function generate() {
  const generation = new memlm.v1.Generation(target, grpc.credentials.createInsecure())
  const stream = generation.Generate({ prompt, sampling: { max_tokens: 16, temperature: 0 }, neighbors: 1 }, metadata)
  stream.on('error', fail)
  stream.on('data', ({ tokens, finished }) => {
    for (const token of tokens?.tokens ?? []) {
      const [source] = token.neighbors
      console.log(JSON.stringify(token.text), source ? `${source.document_id}:${source.line}` : 'the model')
    }
    if (finished) console.log(`${finished.usage.generated_tokens} tokens, ${finished.reason}`)
  })
}

function fail(error) {
  console.error(`${grpc.status[error.code]}: ${error.details}`)
  process.exitCode = 1
}
