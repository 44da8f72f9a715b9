package evictsim

import (
	"fmt"
	"math/rand"
	"os"
	"testing"

	"github.com/kvagent/kvagent/pool/evict"
)

func TestExp(t *testing.T) {
	s, err := ReadTrace("../../../../shared/traces/conversation_trace.jsonl")
	if err != nil {
		t.Skip(err)
	}
	caps := []int{1000, 3000, 10000, 30000}
	if os.Getenv("BRUTE") != "" {
		caps = caps[:2]
	}
	for _, c := range caps {
		sum, base := 0., 0.
		for seed := range 4 {
			r := rand.New(rand.NewSource(int64(seed)))
			v := &Stream{Blocks: s.Blocks}
			for _, q := range s.Requests {
				if r.Intn(50) > 0 || seed == 0 {
					v.Requests = append(v.Requests, q)
				}
			}
			x := Run(v, evict.NewHazard(), c).HitRate()
			if seed == 0 {
				base = x
			}
			sum += x
		}
		fmt.Printf("%d: %.4f mean %.4f; ", c, base, sum/4)
	}
	fmt.Println()
}
