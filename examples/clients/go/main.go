// Lists the datastores of a server, and streams a continuation with the source of each token.
//
//	go run . localhost:50051 "def main("
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	memlmv1 "memlm.example/client/memlm/v1"
)

func main() {
	target, prompt := "localhost:50051", "def main("
	if len(os.Args) > 1 {
		target = os.Args[1]
	}
	if len(os.Args) > 2 {
		prompt = os.Args[2]
	}
	connection, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	ctx := context.Background()
	if token := os.Getenv("MEMLM_TOKEN"); token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	listed, err := memlmv1.NewDatastoresClient(connection).ListDatastores(ctx, &memlmv1.ListDatastoresRequest{})
	if err != nil {
		log.Fatal(err)
	}
	for _, store := range listed.Datastores {
		fmt.Printf("%s: %d entries\n", store.Name, store.NumEntries)
	}
	if err := generate(ctx, memlmv1.NewGenerationClient(connection), prompt); err != nil {
		log.Fatal(err)
	}
}

func generate(ctx context.Context, client memlmv1.GenerationClient, prompt string) error {
	stream, err := client.Generate(ctx, &memlmv1.GenerateRequest{
		Prompt:    prompt,
		Sampling:  &memlmv1.SamplingParams{MaxTokens: proto.Int32(16), Temperature: proto.Float64(0)},
		Neighbors: 1,
	})
	if err != nil {
		return err
	}
	for {
		event, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, token := range event.GetTokens().GetTokens() {
			source := "the model"
			if len(token.Neighbors) > 0 {
				source = fmt.Sprintf("%s:%d", token.Neighbors[0].DocumentId, token.Neighbors[0].Line)
			}
			fmt.Printf("%q %s\n", token.Text, source)
		}
		if finished := event.GetFinished(); finished != nil {
			fmt.Printf("%d tokens, %s\n", finished.Usage.GeneratedTokens, finished.Reason)
		}
	}
}
