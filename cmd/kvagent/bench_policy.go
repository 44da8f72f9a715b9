package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/policysim"
)

// policyReport is block hits along the prefix over all blocks of a trace.
type policyReport struct {
	HitRate float64 `json:"hit_rate"` // the pool's own eviction, through its own interface
	LRU     float64 `json:"lru"`      // exact LRU
	Opt     float64 `json:"opt"`      // Belady's optimum
}

const (
	maxPolicyBlocks    = 10_000_000
	maxTraceLine       = 4 << 20
	defaultPolicyBlock = 10_000
)

func benchPolicyCommand() *cobra.Command {
	var asJSON bool
	var trace string
	capacity := defaultPolicyBlock
	cmd := &cobra.Command{
		Use:   "policy --trace FILE",
		Short: "Hit rate of the pool's eviction on a trace, beside LRU and the optimum",
		Long: "Replays a trace (one JSON object a line, with hash_ids) against a pool of --capacity-blocks blocks whose data is " +
			"address space only. Each request hits the leading blocks that are stored, and then has all its blocks stored.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if capacity < 1 || capacity > maxPolicyBlocks {
				return fmt.Errorf("--capacity-blocks is %d, must be 1 to %d", capacity, maxPolicyBlocks)
			}
			t, err := readPolicyTrace(trace)
			if err != nil {
				return err
			}
			report, err := benchPolicy(t, capacity)
			if err != nil {
				return err
			}
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(report)
			}
			return printPolicy(cmd.OutOrStdout(), report, capacity)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.Flags().StringVar(&trace, "trace", "", "trace file in Mooncake's format")
	cmd.Flags().IntVar(&capacity, "capacity-blocks", capacity, fmt.Sprintf("blocks the pool holds, 1 to %d", maxPolicyBlocks))
	if err := cmd.MarkFlagRequired("trace"); err != nil {
		panic(err) // the flag is defined above
	}
	return cmd
}

// readPolicyTrace reads the block numbers of each request.
func readPolicyTrace(file string) (t policysim.Trace, err error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, maxTraceLine)
	for n := 1; lines.Scan(); n++ {
		var request struct {
			HashIDs []int `json:"hash_ids"`
		}
		if err := json.Unmarshal(lines.Bytes(), &request); err != nil {
			return nil, fmt.Errorf("%s line %d: %w", file, n, err)
		}
		t = append(t, request.HashIDs)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if t.Blocks() == 0 {
		return nil, fmt.Errorf("%s: no request has hash_ids", file)
	}
	return t, nil
}

func benchPolicy(t policysim.Trace, capacity int) (policyReport, error) {
	hits, err := poolHits(t, capacity)
	all := float64(t.Blocks())
	return policyReport{
		HitRate: float64(hits) / all,
		LRU:     float64(policysim.LRU(t, capacity)) / all,
		Opt:     float64(policysim.Belady(t, capacity)) / all,
	}, err
}

// poolHits replays a trace through look-up, reservation and commit.
func poolHits(t policysim.Trace, capacity int) (hits int, err error) {
	// A slab holds one block, so that exactly as many fit as asked for.
	slab := int64(dram.MinSlabBytes)
	for slab*int64(capacity) < dram.MinBytes {
		slab *= 2
	}
	p, err := dram.Open(dram.Options{Bytes: slab * int64(capacity), SlabBytes: slab, Virtual: true})
	if err != nil {
		return 0, err
	}
	defer p.Close()
	space, err := p.OpenSpace(pool.Spec{
		Identity: []byte("policy"), Shards: 1, Groups: []pool.Group{{BlockTokens: 512, ShardBytes: []uint32{uint32(slab)}}},
	})
	if err != nil {
		return 0, err
	}
	for _, request := range t {
		h := policyHashes(request)
		n := p.Prefix(space, 0, h)
		hits += n
		b := pool.Batch{Space: space, Epoch: 1, Hashes: h.Slice(n, h.N)}
		if n > 0 {
			b.Parent = h.At(n - 1)
		}
		b.Status, b.Slots = make([]pool.Status, b.Hashes.N), make([]pool.Slot, b.Hashes.N)
		p.Reserve(&b)
		p.Commit(b.Slots, b.Epoch, b.Status)
	}
	return hits, nil
}

func policyHashes(request []int) pool.Hashes {
	blob := make([]byte, 0, 8*len(request))
	for _, id := range request {
		blob = binary.LittleEndian.AppendUint64(blob, uint64(id))
	}
	return pool.Chain(blob, 8)
}

func printPolicy(w io.Writer, r policyReport, capacity int) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "blocks\tpool\tLRU\toptimum\t")
	fmt.Fprintf(t, "%d\t%.4f\t%.4f\t%.4f\t\n", capacity, r.HitRate, r.LRU, r.Opt)
	return t.Flush()
}
