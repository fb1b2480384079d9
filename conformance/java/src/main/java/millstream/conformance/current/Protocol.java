package millstream.conformance.current;

import java.util.ArrayList;
import java.util.List;
import millstream.conformance.Clients;
import millstream.conformance.Report;
import millstream.conformance.Trial;
import millstream.conformance.Wrong;
import org.apache.kafka.common.protocol.ApiKeys;

/** What the client could ask for against what the broker serves. */
public final class Protocol implements Trial.Suite {
    @Override
    public void run(Clients clients, Report report) {
        report.check("every API that is served has versions that the client knows", () -> {
            List<ApiKeys> without = new ArrayList<>();
            for (ApiKeys api : ApiKeys.clientApis()) {
                if (report.served.has(api.id) && !report.served.overlaps(api.id, api.oldestVersion(), api.latestVersion())) {
                    without.add(api);
                }
            }
            Wrong.unlessEqual("APIs without a version in common", List.of(), without);
        });
        List<String> missing = new ArrayList<>();
        for (ApiKeys api : ApiKeys.clientApis()) {
            if (!report.served.has(api.id)) {
                missing.add(api + " (key " + api.id + ")");
            }
        }
        if (!missing.isEmpty()) {
            report.notServed("Protocol: of the client's APIs " + String.join(", ", missing));
        }
    }
}
