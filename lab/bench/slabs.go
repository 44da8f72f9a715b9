package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/settings"
)

// slabsReport has the cost of storing blocks of one size for blocks of the others.
type slabsReport struct {
	PoolBytes     int64       `json:"pool_bytes"`
	SlabBytes     int64       `json:"slab_bytes"`
	SlotBytes     []int64     `json:"slot_bytes"`    // of a block of each model
	Conversations int         `json:"conversations"` // of each model
	Eviction      string      `json:"eviction"`
	Seed          uint64      `json:"seed"`
	Phases        []slabPhase `json:"phases"`
	Checked       int         `json:"blocks_checked"` // in the end: all that were still stored
	Wrong         int         `json:"blocks_wrong"`
}

// slabPhase is one part of a run: filling the pool with the first model, storing the first blocks
// of the others, and all models alternating.
type slabPhase struct {
	Name           string  `json:"name"`
	StoredBytes    int64   `json:"stored_bytes"`
	EvictedBytes   int64   `json:"evicted_bytes"`
	EvictedRatio   float64 `json:"evicted_ratio"` // of the bytes stored
	MovedBytes     int64   `json:"moved_bytes"`
	MovedRatio     float64 `json:"moved_ratio"`      // of the bytes stored
	SlabsGiven     uint64  `json:"slabs_reassigned"` // to another size
	Refused        int     `json:"blocks_refused"`   // no room could be made
	Reservations   int     `json:"reservations"`
	ReserveMeanUs  float64 `json:"reserve_mean_us"`
	ReserveWorstUs float64 `json:"reserve_worst_us"`
}

const (
	defaultSlabsPool          = 1 << 30
	minSlabsPool              = 1 << 20
	defaultSlabsStore         = 19 << 20
	defaultSlabsConversations = 256
	maxSlabsConversations     = 1 << 16
	minSlabsSizes             = 2
	maxSlabsSizes             = 8
	minSlabsSlot              = 1 << 10
	defaultSlabsSeed          = 1
)

// slabsSettings are the settings of bench slabs.
type slabsSettings struct {
	pool, slab, store int64
	slots             []string
	conversations     int
	eviction          string
	seed              uint64
	json              bool

	sizes []int64 // slots, as numbers
}

func slabsCommand() *cobra.Command {
	s := slabsSettings{
		pool: defaultSlabsPool, store: defaultSlabsStore, slots: []string{"64KiB", "96KiB"},
		conversations: defaultSlabsConversations, eviction: evict.DefaultName, seed: defaultSlabsSeed,
	}
	cmd := &cobra.Command{
		Use:   "slabs",
		Short: "Measure what storing blocks of one size costs blocks of another",
		Long: `Fills a pool with interleaved conversations of a first model, stores some of models whose
blocks have other sizes, and then plays all models in turn until twice the pool has been stored.
For each of the three phases it prints the bytes stored, the bytes evicted and moved for them, and
the time of a reservation. In the end every block that is still stored is compared.`,
		Example: `  kvbench bench slabs --json
  kvbench bench slabs --pool 256MiB --slots 16KiB,40KiB,100KiB --seed 7`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return s.run(cmd.OutOrStdout()) },
	}
	f := cmd.Flags()
	f.BoolVar(&s.json, "json", false, "print one JSON object")
	f.Var(settings.Size(&s.pool, minSlabsPool, dram.MaxBytes), "pool", "size of the pool, which is allocated")
	f.Var(settings.Size(&s.slab, 0, dram.MaxSlabBytes), "slab",
		"size of a slab, a power of two; 0: as serve chooses it")
	f.StringSliceVar(&s.slots, "slots", s.slots,
		fmt.Sprintf("sizes of a block, one for each model, %d to %d of them", minSlabsSizes, maxSlabsSizes))
	f.Var(settings.Count(&s.conversations, 1, maxSlabsConversations), "conversations",
		"conversations of each model, interleaved at random")
	f.Var(settings.Size(&s.store, 1, dram.MaxBytes), "store",
		"bytes that each further model stores in the second phase")
	f.Var(settings.Choice(&s.eviction, evict.Names), "eviction", "policy of the pool")
	f.Uint64Var(&s.seed, "seed", s.seed, "seed of the conversations and of the hashes of keys; for these 0 means 1")
	return cmd
}

func (s *slabsSettings) run(out io.Writer) error {
	if err := s.complete(); err != nil {
		return settings.Invalid(err)
	}
	report, err := measureSlabs(s)
	if err != nil {
		return err
	}
	if s.json {
		err = json.NewEncoder(out).Encode(report)
	} else {
		err = printSlabs(out, &report)
	}
	if err == nil && report.Wrong > 0 {
		err = fmt.Errorf("%d of %d blocks have wrong bytes", report.Wrong, report.Checked)
	}
	return err
}

// complete parses the sizes.
func (s *slabsSettings) complete() error {
	if len(s.slots) < minSlabsSizes || len(s.slots) > maxSlabsSizes {
		return fmt.Errorf("--slots has %d sizes, must have %d to %d", len(s.slots), minSlabsSizes, maxSlabsSizes)
	}
	s.sizes = nil
	for i, text := range s.slots {
		n, err := settings.ParseSize(text)
		if err != nil {
			return fmt.Errorf("--slots: size %d: %w", i, err)
		}
		if most := min(s.pool, dram.MaxSlabBytes); n < minSlabsSlot || n > most {
			return fmt.Errorf("--slots: size %d is %d bytes, must be %d to %d", i, n, minSlabsSlot, most)
		}
		s.sizes = append(s.sizes, n)
	}
	return nil
}

func printSlabs(w io.Writer, r *slabsReport) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "phase\tstored MiB\tevicted MiB\tevicted/stored\t"+
		"moved MiB\tmoved/stored\tslabs\trefused\treserve us\tworst us\t")
	for _, p := range r.Phases {
		fmt.Fprintf(t, "%s\t%.1f\t%.1f\t%.2f\t%.1f\t%.2f\t%d\t%d\t%.1f\t%.0f\t\n",
			p.Name, mib(p.StoredBytes), mib(p.EvictedBytes), p.EvictedRatio,
			mib(p.MovedBytes), p.MovedRatio, p.SlabsGiven, p.Refused, p.ReserveMeanUs, p.ReserveWorstUs)
	}
	fmt.Fprintf(t, "%d blocks compared, %d wrong\n", r.Checked, r.Wrong)
	return t.Flush()
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }
