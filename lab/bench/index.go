package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

// indexRow is one size of the index. Blocks are found in chains drawn at random.
type indexRow struct {
	Blocks        int     `json:"blocks"`
	NsPerBlock    float64 `json:"ns_per_block"`     // exists, all hits, median of the rounds
	BytesPerBlock float64 `json:"bytes_per_block"`  // hash table, headers and slot table, as resident
	MapNsPerBlock float64 `json:"map_ns_per_block"` // the same look-ups in map[[32]byte]uint32
	PinUs2048     float64 `json:"pin_us_2048"`      // pin of a chain of 2,048 blocks, median
	InsertNs      float64 `json:"insert_ns"`        // reserve and commit, per block
	InsertMaxUs   float64 `json:"insert_max_us"`    // longest reservation of a chain while the index grew
}

type indexReport struct {
	Rows []indexRow `json:"rows"`
	// BytesPerBlock8Shards is the same as bytes_per_block for entries of 8 shards, at most 56 more.
	BytesPerBlock8Shards float64 `json:"bytes_per_block_8_shards"`
	Blocks8Shards        int     `json:"blocks_8_shards"`
}

const (
	maxIndexBlocks     = 100_000_000
	wideIndexBlocks    = 1_000_000
	indexChain         = 128 // blocks of a chain
	indexRounds        = 5
	indexQueryChains   = 8192 // chains looked up in a round, at most
	indexPinChain      = 2048 // blocks of a prompt: so many chains hang on each other
	indexPinChains     = indexPinChain / indexChain
	indexShardsOfWide  = 8
	indexBytesPerShard = 1024
)

func indexCommand() *cobra.Command {
	var asJSON bool
	blocks := []int{10_000, 1_000_000, 10_000_000}
	cmd := &cobra.Command{
		Use:   "index",
		Short: "Time and memory of the pool's index, per block",
		Long: "Fills the index of a pool whose data is address space only, and looks up chains of " +
			fmt.Sprint(indexChain) + " blocks drawn at random.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			report, err := measureIndex(blocks, wideIndexBlocks)
			if err != nil {
				return err
			}
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(report)
			}
			return printIndex(cmd.OutOrStdout(), report)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.Flags().IntSliceVar(&blocks, "blocks", blocks,
		fmt.Sprintf("blocks stored, one row each, %d to %d", indexPinChain, maxIndexBlocks))
	return cmd
}

func measureIndex(sizes []int, wide int) (r indexReport, err error) {
	for _, n := range sizes {
		if n < indexPinChain || n > maxIndexBlocks {
			return r, fmt.Errorf("--blocks has %d, must be %d to %d", n, indexPinChain, maxIndexBlocks)
		}
		row, err := measureIndexSize(n)
		if err != nil {
			return r, err
		}
		r.Rows = append(r.Rows, row)
	}
	f, err := fillIndex(wide, indexShardsOfWide)
	if err != nil {
		return r, err
	}
	defer f.pool.Close()
	r.Blocks8Shards, r.BytesPerBlock8Shards = wide, f.bytesPerBlock()
	return r, nil
}

func printIndex(w io.Writer, r indexReport) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t,
		"blocks\texists ns/block\tGo map ns/block\tpin 2,048 us\tinsert ns/block\tlongest us\tbytes/block\t")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%d\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.1f\t\n", row.Blocks, row.NsPerBlock, row.MapNsPerBlock,
			row.PinUs2048, row.InsertNs, row.InsertMaxUs, row.BytesPerBlock)
	}
	fmt.Fprintf(t, "%d of 8 shards\t\t\t\t\t\t%.1f\t\n", r.Blocks8Shards, r.BytesPerBlock8Shards)
	return t.Flush()
}
