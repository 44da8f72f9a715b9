package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/settings"
)

// calibrateCommand makes the command that measures the fastest copy paths of the visible GPU.
func calibrateCommand() *cobra.Command {
	path, force, kernel := defaultCopyTables, false, false
	cmd := &cobra.Command{
		Use:   "calibrate",
		Short: "Measure the fastest copy paths of this type of GPU",
		Long: `Calibrate measures on the one GPU that this process sees
(CUDA_VISIBLE_DEVICES) which copy path is fastest for each length of runs: single copies, one call for many, or one call
for rows at constant distances. It writes the table to a file that serve reads at its start. It takes some seconds;
concurrent copies distort it. A type of GPU that is in the file already, with this driver, is measured again only with
--force. Serve does the same when the first engine on a GPU registers.`,
		Example: `  CUDA_VISIBLE_DEVICES=0 kvagent calibrate
  kvagent calibrate --force --copy-tables /tmp/tables.json`,
		Args: settings.Args(cobra.NoArgs),
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			return settings.Invalid(settings.Fill(cmd.Flags(), os.LookupEnv))
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return calibrate(path, force, kernel, cmd.OutOrStdout()) },
	}
	cmd.Flags().StringVar(&path, "copy-tables", path, "file for the table")
	cmd.Flags().BoolVar(&kernel, "kernel", false,
		"also measure the copy kernel, which takes a few thread blocks from the engine; the table uses it for "+
			"lengths at which it takes less than 3/4 of the copy engines' best time")
	cmd.Flags().BoolVar(&force, "force", false, "measure even if the file has this type of GPU already")
	return cmd
}

func calibrate(path string, force, kernel bool, out io.Writer) (err error) {
	known, err := readCopyTables(path)
	if err != nil {
		fmt.Fprintf(out, "%v: measured again\n", err)
	}
	arena, err := unix.Mmap(-1, 0, cuda.MinPinPiece, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Munmap(arena) }() // no device is open any more
	d, err := cuda.Open(cuda.Options{Arena: arena, MeasureKernel: kernel})
	if err != nil {
		return err
	}
	defer func() {
		if again := d.Close(cudaipc.AllPeers); err == nil {
			err = again
		}
	}()
	i := d.Info()
	if known := cudaipc.FindCopyTable(known, i.Name, i.Driver); known != nil && !force {
		fmt.Fprintf(out, "%s (measured before, in %s)\n", known.String(), path)
		return nil
	}
	t, err := d.Calibrate(cuda.CalibrateWithin)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, t.String())
	return writeCopyTable(path, &t)
}
