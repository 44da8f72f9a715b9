package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/pool/peer"
	"github.com/kvagent/kvagent/settings"
)

// peerReport compares fetches from another process's pool with a plain TCP copy of the same bytes
// between the same memory, over as many connections, alternating. GB are 10^9 bytes. Processor
// seconds are those of both processes.
type peerReport struct {
	Bytes   int64     `json:"bytes"` // of one measurement
	Rounds  int       `json:"rounds"`
	Streams int       `json:"streams"`
	Rows    []peerRow `json:"rows"`
	Ratio   float64   `json:"ratio"` // the smallest KeyRatio
}

type peerRow struct {
	BlockBytes  int     `json:"block_bytes"`
	PlainGBps   float64 `json:"plain_gbps"`
	KeyGBps     float64 `json:"key_gbps"`
	TLSGBps     float64 `json:"tls_gbps"`
	KeyRatio    float64 `json:"key_ratio"` // median of the ratios of adjacent measurements
	TLSRatio    float64 `json:"tls_ratio"`
	PlainCPUsGB float64 `json:"plain_cpu_s_per_gb"`
	KeyCPUsGB   float64 `json:"key_cpu_s_per_gb"`
	TLSCPUsGB   float64 `json:"tls_cpu_s_per_gb"`
}

type peerSettings struct {
	json       bool
	bytes      int64
	rounds     int
	streams    int
	batchBytes int64
	noTLS      bool
}

// Ranges of the settings, and the sizes of blocks.
const (
	minPeerBytes, maxPeerBytes = 16 << 20, 1 << 36
	maxPeerRounds              = 1000
)

var peerBlocks = []int{64 << 10, 256 << 10, 1 << 20, 4 << 20}

func peerCommand() *cobra.Command {
	s := peerSettings{}
	cmd := &cobra.Command{
		Use:   "peer",
		Short: "Compare fetches from another agent's pool with a plain TCP copy",
		Long: `Fills a pool in a process of its own, and fetches its blocks over loopback into a pool of this
process, which verifies and commits them; with a shared key, and with TLS. Alternating with that, a
plain TCP copy moves the same bytes from the same memory into the same memory over as many
connections. Takes about a minute, and twice 5 times --bytes of memory.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.check(); err != nil {
				return settings.Invalid(err)
			}
			report, err := measurePeer(&s)
			if err != nil {
				return err
			}
			return printPeer(cmd.OutOrStdout(), report, s.json)
		},
	}
	cmd.Flags().BoolVar(&s.json, "json", false, "print one JSON object")
	cmd.Flags().Int64Var(&s.bytes, "bytes", 256<<20, "bytes of blocks of one measurement")
	cmd.Flags().IntVar(&s.rounds, "rounds", 9, "measurements of each kind, of which the median counts")
	cmd.Flags().IntVar(&s.streams, "streams", 2, "connections")
	cmd.Flags().Int64Var(&s.batchBytes, "batch-bytes", 0, "bytes of one request; 0: the client's default")
	cmd.Flags().BoolVar(&s.noTLS, "no-tls", false, "leave TLS out")
	cmd.AddCommand(peerAgentCommand())
	return cmd
}

func (s *peerSettings) check() error {
	if s.bytes < minPeerBytes || s.bytes > maxPeerBytes {
		return fmt.Errorf("--bytes is %d, must be %d to %d", s.bytes, minPeerBytes, int64(maxPeerBytes))
	}
	if s.rounds < 1 || s.rounds > maxPeerRounds {
		return fmt.Errorf("--rounds is %d, must be 1 to %d", s.rounds, maxPeerRounds)
	}
	if s.streams < 1 || s.streams > 16 {
		return fmt.Errorf("--streams is %d, must be 1 to 16", s.streams)
	}
	if s.batchBytes != 0 && (s.batchBytes < 64<<10 || s.batchBytes > peer.MaxBatchBytes) {
		return fmt.Errorf("--batch-bytes is %d, must be 0, or 65536 to %d", s.batchBytes, peer.MaxBatchBytes)
	}
	return nil
}

func printPeer(out io.Writer, r *peerReport, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(out).Encode(r)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(w, "block\tplain GB/s\tkey GB/s\tratio\tTLS GB/s\tratio\tplain s/GB\tkey s/GB\tTLS s/GB\t")
	for _, row := range r.Rows {
		_, _ = fmt.Fprintf(w, "%d KiB\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t\n", row.BlockBytes>>10,
			row.PlainGBps, row.KeyGBps, row.KeyRatio, row.TLSGBps, row.TLSRatio, row.PlainCPUsGB, row.KeyCPUsGB,
			row.TLSCPUsGB)
	}
	return w.Flush()
}
