// Package size is the command that simulates a trace in pools of many sizes, so that an operator
// chooses one by his own load.
package size

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/pool/evict/evictsim"
	"github.com/kvagent/kvagent/settings"
)

// row is the hit rates of one size: blocks found at the beginnings of prompts, as shares of all
// blocks asked for.
type row struct {
	Blocks  int     `json:"blocks"`
	Bytes   int64   `json:"bytes,omitempty"` // with --block-bytes
	LRU     float64 `json:"lru"`             // exact LRU
	Default float64 `json:"default"`         // the agent's default policy
	Optimum float64 `json:"optimum"`         // Belady's: no policy hits more
}

// report is the answer for a trace.
type report struct {
	Requests int   `json:"requests"`
	Asked    int   `json:"blocks_asked"`
	Unique   int   `json:"blocks_unique"` // a pool of so many never evicts
	Enough   row   `json:"enough"`        // the smallest size with enoughShare of the most hits
	Bend     row   `json:"bend"`          // farthest above the chord: from there on hits cost more than the mean
	Rows     []row `json:"rows"`
}

// Limits of the settings.
const (
	maxBlocks     = 1 << 27
	points        = 12  // sizes, unless they are given
	span          = 256 // the largest size is so many times the smallest
	enoughShare   = 0.95
	maxBlockBytes = 1 << 30
)

type options struct {
	trace      string
	blocks     []int
	blockBytes int64
	json       bool
}

const help = `Size simulates the requests of a trace, or of a folder of them, in pools of several
sizes: with exact LRU, with the agent's default eviction, and with the optimum, which knows the future. A request hits
the leading blocks that are stored; then all its blocks are stored. The last size is that of a pool that never evicts.

It says where the curve bends: from there on more memory brings fewer hits than on the average of all sizes. With
--block-bytes, the bytes of a block of the trace on all ranks of the node together, sizes are shown in bytes, too.`

// Command is size.
func Command() *cobra.Command {
	s := &options{}
	cmd := &cobra.Command{
		Use: "size --trace FILE", Short: "Show a trace's hit rate against the size of the pool", Long: help,
		Example: "  kvbench size --trace monday.jsonl --block-bytes 2MiB",
		Args:    settings.Args(cobra.NoArgs),
		RunE:    func(cmd *cobra.Command, _ []string) error { return s.run(cmd.OutOrStdout()) },
	}
	f := cmd.Flags()
	f.StringVar(&s.trace, "trace", "", "trace file in Mooncake's format, or a folder of them")
	f.IntSliceVar(&s.blocks, "capacity-blocks", nil,
		fmt.Sprintf("these sizes, in blocks, 1 to %d; several separated by commas", maxBlocks))
	f.Var(settings.Size(&s.blockBytes, 0, maxBlockBytes), "block-bytes", "bytes of a block; 0: not shown")
	f.BoolVar(&s.json, "json", false, "print one JSON object")
	return cmd
}

func (s *options) run(out io.Writer) error {
	if s.trace == "" {
		return settings.Invalid(errors.New("trace: not given, allowed: a file, or a folder of them"))
	}
	for _, n := range s.blocks {
		if n < 1 || n > maxBlocks {
			return settings.Invalid(fmt.Errorf("capacity-blocks: %d, allowed: 1 to %d", n, maxBlocks))
		}
	}
	stream, err := evictsim.ReadTrace(s.trace)
	if err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	stream.HashSeed = 1
	r := s.simulate(stream)
	if s.json {
		return json.NewEncoder(out).Encode(r)
	}
	return r.print(out)
}

// sizes returns the sizes to simulate, ascending, without duplicates.
func (s *options) sizes(unique int) []int {
	all := slices.Clone(s.blocks)
	for i := 0; len(s.blocks) == 0 && i < points; i++ {
		share := math.Pow(span, float64(i)/(points-1)-1)
		all = append(all, max(1, int(math.Round(float64(unique)*share))))
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// simulate plays the stream at each size.
func (s *options) simulate(stream *evictsim.Stream) *report {
	r := &report{Requests: len(stream.Requests), Asked: stream.Looked(), Unique: stream.Blocks}
	sizes := s.sizes(stream.Blocks)
	r.Rows = make([]row, len(sizes))
	var workers sync.WaitGroup
	for i, blocks := range sizes {
		workers.Go(func() {
			r.Rows[i] = row{
				Blocks: blocks, Bytes: int64(blocks) * s.blockBytes,
				LRU:     evictsim.LRU(stream, blocks).HitRate(),
				Default: evictsim.Run(stream, evict.Named(evict.DefaultName), min(blocks, stream.Blocks)).HitRate(),
				Optimum: evictsim.Optimum(stream, blocks).HitRate(),
			}
		})
	}
	workers.Wait()
	last := r.Rows[len(r.Rows)-1]
	r.Enough, r.Bend = last, last
	for _, one := range slices.Backward(r.Rows) {
		if one.Default >= enoughShare*last.Default {
			r.Enough = one
		}
	}
	first, most := r.Rows[0], 0.
	for _, one := range r.Rows {
		along := float64(one.Blocks-first.Blocks) / float64(max(last.Blocks-first.Blocks, 1))
		if above := one.Default - first.Default - along*(last.Default-first.Default); above > most {
			r.Bend, most = one, above
		}
	}
	return r
}

func (r *report) print(out io.Writer) error {
	fmt.Fprintf(out, "%d requests, %d blocks asked for, %d different ones\n\n", r.Requests, r.Asked, r.Unique)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "blocks\tpool\tLRU\t%s\toptimum\t\n", evict.DefaultName)
	for i := range r.Rows {
		one := &r.Rows[i]
		fmt.Fprintf(t, "%d\t%s\t%.4f\t%.4f\t%.4f\t\n", one.Blocks, one.size(), one.LRU, one.Default, one.Optimum)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "\nthe curve bends at %d blocks %s\n%.0f %% of the hits of the largest pool need %d "+
		"blocks %s\n", r.Bend.Blocks, r.Bend.size(), 100*enoughShare, r.Enough.Blocks, r.Enough.size())
	return err
}

// size returns the row's size in bytes, if that is known.
func (r *row) size() string {
	if r.Bytes == 0 {
		return ""
	}
	return settings.HumanSize(r.Bytes)
}
