package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/settings"
)

// version and commit may be set by the linker; by default they are the module's and the checkout's.
var version, commit string

// buildInfo describes the binary's build.
type buildInfo struct {
	Version     string `json:"version"`
	Commit      string `json:"commit"`
	Modified    bool   `json:"modified"` // built from a changed checkout
	Go          string `json:"go"`
	Platform    string `json:"platform"`
	ProtocolMin int    `json:"protocol_min"`
	ProtocolMax int    `json:"protocol_max"`
}

func readBuildInfo() (b buildInfo) {
	b = buildInfo{
		Version: version, Commit: commit, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
		ProtocolMin: ipc.MinVersion, ProtocolMax: ipc.Version,
	}
	defer func() { b.Commit = cmp.Or(b.Commit, "unknown") }()
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	if b.Version == "" {
		b.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Commit = cmp.Or(b.Commit, s.Value)
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	return b
}

func versionCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Show the version of this build",
		Args:  settings.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return printVersion(cmd.OutOrStdout(), readBuildInfo(), asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func printVersion(out io.Writer, b buildInfo, asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		return e.Encode(b)
	}
	modified := ""
	if b.Modified {
		modified = ", with changes"
	}
	_, err := fmt.Fprintf(out, "kvagent %s (commit %s%s), %s %s, session protocol %d to %d\n",
		b.Version, b.Commit, modified, b.Go, b.Platform, b.ProtocolMin, b.ProtocolMax)
	return err
}
