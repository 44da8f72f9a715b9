package main

import (
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/settings"
)

func setCommand() *cobra.Command {
	dir := socketDirSetting()
	cmd := &cobra.Command{
		Use:   "set loads=on|off saves=on|off",
		Short: "Switch loads or saves of a running agent",
		Long: `Set switches loads and saves off and on while the agent runs. With loads off, look-ups find nothing and
engines compute; with saves off, nothing new is stored. Engines are notified at once.`,
		Example: `  kvagent set loads=off
  kvagent set loads=on saves=on --socket-dir /run/kvagent`,
		Args: settings.Args(cobra.MinimumNArgs(1)),
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			return settings.Invalid(settings.Fill(cmd.Flags(), os.LookupEnv))
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			query, err := parseSwitches(args)
			if err != nil {
				return settings.Invalid(err)
			}
			body, err := adminclient.New(*dir).Post(cmd.Context(), "/set?"+query.Encode(), nil)
			if err != nil {
				return err
			}
			var now admin.SwitchState
			if err := json.Unmarshal(body, &now); err != nil {
				return fmt.Errorf("set: %w", err)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "loads=%s saves=%s\n", onOff(now.Loads), onOff(now.Saves))
			return err
		},
		ValidArgs: []string{"loads=on", "loads=off", "saves=on", "saves=off"},
	}
	addSocketDir(cmd, dir)
	return cmd
}

// parseSwitches parses arguments such as loads=on saves=off.
func parseSwitches(args []string) (url.Values, error) {
	query := url.Values{}
	for _, arg := range args {
		key, value, _ := strings.Cut(arg, "=")
		if key != "loads" && key != "saves" {
			return nil, fmt.Errorf("%s: unknown, allowed: loads=on, loads=off, saves=on, saves=off", arg)
		}
		if query.Has(key) {
			return nil, fmt.Errorf("%s: given twice, allowed: once", key)
		}
		if _, err := admin.ParseSwitch(key, value); err != nil {
			return nil, err
		}
		query.Set(key, value)
	}
	return query, nil
}
