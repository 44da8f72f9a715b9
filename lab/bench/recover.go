package bench

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/settings"
)

// recoverReport describes what was recovered of a pool whose process was killed while it saved.
type recoverReport struct {
	Slots          int     `json:"slots"`
	Recovered      int     `json:"recovered"`
	RecoveredRatio float64 `json:"recovered_ratio"` // of the slots, all of which were in use
	RecoverS       float64 `json:"recover_s"`       // from the open call until the pool can be used
	FillS          float64 `json:"fill_s"`          // of the process that was killed
	Checked        int     `json:"blocks_checked"`  // a sample, compared byte for byte
	Wrong          int     `json:"blocks_wrong"`
}

const (
	defaultRecoverSlots = 1_000_000
	minRecoverSlots     = 10_000
	maxRecoverSlots     = 100_000_000
	recoverSlotBytes    = 1 << 10
	recoverChain        = 128 // blocks of a chain
	recoverChecked      = 512 // chains compared
)

func recoverCommand() *cobra.Command {
	var asJSON bool
	slots, dir := defaultRecoverSlots, "/dev/shm"
	cmd := &cobra.Command{
		Use:   "recover",
		Short: "Measure how much of a killed agent's pool is recovered, and how fast",
		Long: fmt.Sprintf(`Fills a pool in a file with blocks of %d bytes in a process of its own, kills that
process while it saves more, opens the file, and compares a sample of the blocks byte for byte.`, recoverSlotBytes),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if slots < minRecoverSlots || slots > maxRecoverSlots {
				return settings.Invalid(fmt.Errorf("slots: %d, allowed: %d to %d", slots, minRecoverSlots,
					maxRecoverSlots))
			}
			report, err := measureRecover(slots, dir)
			if err != nil {
				return err
			}
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(report)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%d of %d blocks (%.2f %%) came back in %.3f s; %d compared, %d wrong\n",
				report.Recovered, report.Slots, 100*report.RecoveredRatio, report.RecoverS, report.Checked,
				report.Wrong)
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.Flags().IntVar(&slots, "slots", slots, fmt.Sprintf(
		"blocks that the pool holds, %d to %d; it takes 1.1 KiB for each", minRecoverSlots, maxRecoverSlots))
	cmd.Flags().StringVar(&dir, "dir", dir, "directory on tmpfs or hugetlbfs for the file, which is removed in the end")
	cmd.AddCommand(recoverFillCommand())
	return cmd
}

func measureRecover(slots int, dir string) (r recoverReport, err error) {
	dir, err = os.MkdirTemp(dir, "kvagent-recover-")
	if err != nil {
		return r, fmt.Errorf("dir: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }() // tmpfs: it fails only if another process removed it
	path := filepath.Join(dir, "pool")
	filled, err := fillAndKill(path, slots)
	if err != nil {
		return r, err
	}
	p, err := dram.Open(recoverOptions(path, slots))
	if err != nil {
		return r, err
	}
	defer p.Close()
	found := p.Info().Recovery
	if found.Cold != "" || found.New {
		return r, fmt.Errorf("%s: nothing came back: %s", path, found.Cold)
	}
	slots = int(p.Info().Bytes / recoverSlotBytes) // rounded up to slabs
	r = recoverReport{
		Slots: slots, Recovered: found.Entries, RecoveredRatio: float64(found.Entries) / float64(slots),
		RecoverS: found.Took.Seconds(), FillS: filled.took.Seconds(),
	}
	r.Checked, r.Wrong, err = checkRecovered(p, filled.chains)
	if err == nil && r.Wrong > 0 {
		err = fmt.Errorf("%d of %d blocks have wrong bytes", r.Wrong, r.Checked)
	}
	return r, err
}
