package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/settings"
)

// diskReport compares the disk tier with its disk: the same bytes by the same calls past the page
// cache, alternating. GB/s are 10^9 bytes of blocks per second, medians; ratios are those of
// adjacent measurements: the median, and the quartiles.
type diskReport struct {
	BlockBytes     int     `json:"block_bytes"`
	Bytes          int64   `json:"bytes"` // of one measurement
	Rounds         int     `json:"rounds"`
	Direct         bool    `json:"direct"` // past the page cache
	WriteGBps      float64 `json:"write_gbps"`
	RawWriteGBps   float64 `json:"raw_write_gbps"`
	WriteRatio     float64 `json:"write_ratio"`
	WriteRatioLow  float64 `json:"write_ratio_low"`
	WriteRatioHigh float64 `json:"write_ratio_high"`
	ReadGBps       float64 `json:"read_gbps"`
	RawReadGBps    float64 `json:"raw_read_gbps"`
	ReadRatio      float64 `json:"read_ratio"`
	ReadRatioLow   float64 `json:"read_ratio_low"`
	ReadRatioHigh  float64 `json:"read_ratio_high"`
	Ratio          float64 `json:"ratio"` // the smaller median
}

type diskSettings struct {
	json       bool
	dir        string
	bytes      int64
	blockBytes int
	rounds     int
}

// Ranges of the settings.
const (
	minDiskBytes, maxDiskBytes           = 16 << 20, 1 << 40
	minDiskBlockBytes, maxDiskBlockBytes = 4 << 10, 4 << 20
	maxDiskRounds                        = 1000
)

func diskCommand() *cobra.Command {
	s := diskSettings{}
	cmd := &cobra.Command{
		Use:   "disk",
		Short: "Compare writes and reads of the disk tier with the disk's own rate",
		Long: `Writes new blocks through the disk tier and reads them in random order, in batches. Alternating with
that, the same bytes are written and read by plain O_DIRECT calls (pwrite, pread, each in a thread
of its own) of the same size and depth, from and to memory of the same kind, in files whose room is
allocated beforehand. Needs 2 * (--rounds + 1) * --bytes and 1 GiB of disk in --dir, where it
creates a directory and removes it. Takes about 20 seconds on a disk of 1 GB/s. Other work on the
machine slows the tier, which copies and verifies every byte, more than the plain calls.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.check(); err != nil {
				return settings.Invalid(err)
			}
			report, err := measureDisk(&s)
			if err != nil {
				return err
			}
			return printDisk(cmd.OutOrStdout(), report, s.json)
		},
	}
	cmd.Flags().BoolVar(&s.json, "json", false, "print one JSON object")
	cmd.Flags().StringVar(&s.dir, "dir", os.TempDir(), "a directory on the disk")
	cmd.Flags().Int64Var(&s.bytes, "bytes", 256<<20, "bytes of blocks of one measurement")
	cmd.Flags().IntVar(&s.blockBytes, "block-bytes", 1<<20, "bytes of one block, a multiple of 4 KiB")
	cmd.Flags().IntVar(&s.rounds, "rounds", 15, "measurements of each kind, of which the median counts")
	return cmd
}

func (s *diskSettings) check() error {
	if s.bytes < minDiskBytes || s.bytes > maxDiskBytes {
		return fmt.Errorf("--bytes is %d, must be %d to %d", s.bytes, minDiskBytes, int64(maxDiskBytes))
	}
	if s.blockBytes < minDiskBlockBytes || s.blockBytes > maxDiskBlockBytes || s.blockBytes%4096 != 0 {
		return fmt.Errorf("--block-bytes is %d, must be a multiple of 4096 from %d to %d", s.blockBytes,
			minDiskBlockBytes, maxDiskBlockBytes)
	}
	if s.rounds < 1 || s.rounds > maxDiskRounds {
		return fmt.Errorf("--rounds is %d, must be 1 to %d", s.rounds, maxDiskRounds)
	}
	return nil
}

func printDisk(out io.Writer, r *diskReport, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(out).Encode(r)
	}
	const line = "%s %.2f GB/s, the disk %.2f GB/s, ratio %.2f (quartiles %.2f to %.2f)\n"
	_, err := fmt.Fprintf(out, line+line,
		"write", r.WriteGBps, r.RawWriteGBps, r.WriteRatio, r.WriteRatioLow, r.WriteRatioHigh,
		"read ", r.ReadGBps, r.RawReadGBps, r.ReadRatio, r.ReadRatioLow, r.ReadRatioHigh)
	return err
}
